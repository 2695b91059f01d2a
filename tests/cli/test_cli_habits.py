"""Words that people bring from other systems, and the word that each is answered with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import composer3d
from composer3d.manifest import read_text, type_manifest
from composer3d.runner.runner_tables import TABLES

BATCH = "train.microbatch is sequences per forward and rank, train.global_batch those of a step over all ranks"
UNKNOWN = {
    "train.lr = 1e-3": '[train] unknown key "lr"; write optimizer.lr',
    "train.batch_size = 8": f'[train] unknown key "batch_size"; {BATCH}',
    "train.epochs = 3": '[train] unknown key "epochs"; train.steps counts optimizer steps, and nothing counts epochs',
    "train.max_grad_norm = 1.0": '[train] unknown key "max_grad_norm"; write grad_clip',
    "train.max_steps = 5": '[train] unknown key "max_steps"; did you mean "steps"?',
    "data.batch_size = 8": f'[data] unknown key "batch_size"; {BATCH}',
    "data.max_length = 8": '[data] unknown key "max_length"; write seq_len',
    "mesh.island = 2": '[mesh] unknown key "island"; it is the axis of [communication.local_sgd]; write that table too',
    "mesh.dp = 2": '[mesh] unknown key "dp"; write dp_shard (parameters sharded) or dp_replicate (parameters',
    "optimizer.learning_rate = 1.0": '[optimizer] unknown key "learning_rate"; write lr',
    "lr_schedule.warmup_steps = 1": '[lr_schedule] unknown key "warmup_steps"; write warmup',
    "model.dim = 8": '[model] unknown key "dim"; arguments of the model stand in model.args: write model.args.dim',
    "batch_size = 8": f'[batch_size] unknown table "batch_size"; {BATCH}',
    "epochs = 8": '[epochs] unknown table "epochs"; train.steps counts optimizer steps, and nothing counts epochs',
    'optimizer = "AdamW"': '[optimizer] use = "AdamW" is not adamw, sgd, muon or "module:Class"; write "adamw"',
    'optimizer = "torch.optim.AdamW"': 'muon or "module:Class"; write "adamw"',
    'optimizer = "torch.optim.Adam"': 'muon or "module:Class"; write "torch.optim:Adam"',
    'optimizer = "RMSprop"': 'muon or "module:Class"; write "torch.optim:RMSprop"',
    'model = "cli_models.py:build"': '"cli_models.py:build" names a file, not a module; write "cli_models:build"',
    'model = "cli_models.build"': '[model] "cli_models.build" is not a reference; write "cli_models:build"',
    'model = "./cli_models.py:build"': '"./cli_models.py:build" is not a reference; write "cli_models:build"',
    'precision = "bf16"': "precision must be a table of plugins, [precision.NAME]; it is a key of [precision.mixed]; "
    "write param_dtype there; NAME is one of: float8, int8, ",
}
# Of Lightning, transformers, DeepSpeed, Megatron-LM, torchtitan and torchrun: key, and what it is answered with.
ELSEWHERE = {
    "gradient_accumulation_steps = 4": "write train.accumulate: micro-batches a step on each rank",
    "accumulate_grad_batches = 4": "write train.accumulate: micro-batches a step on each rank",
    "max_steps = 9": "write train.steps",
    "train_iters = 9": "write train.steps",
    "max_epochs = 3": "train.steps counts optimizer steps, and nothing counts epochs",
    "per_device_train_batch_size = 8": "write train.microbatch",
    "train_micro_batch_size_per_gpu = 8": "write train.microbatch",
    "num_layers = 12": "arguments of the model stand in model.args: write model.args.num_layers",
    "nproc_per_node = 2": "run MANIFEST --nproc-per-node N, or torchrun, starts them",
    "devices = 2": "the degrees of mesh multiply to the number of ranks",
    "zero_stage = 3": "it is a key of [sharding.fsdp2]; write zero there",
    "zero_optimization.stage = 3": "composer3d import FILE writes a manifest from that system's file",
    "bf16 = true": "dtypes are plugins of the family precision",
    'fsdp = "full_shard"': "write [sharding.fsdp2]",
    "wandb.project = 'x'": "write [profiling.wandb]",
    'report_to = "wandb"': "loggers are plugins of the family profiling",
    "warmup_steps = 100": "write lr_schedule.warmup",
    "lr_schedule.num_warmup_steps = 100": '[lr_schedule] unknown key "num_warmup_steps"; write warmup',
    "train.gradient_clip_val = 1.0": '[train] unknown key "gradient_clip_val"; did you mean "grad_clip"?',
    "save_steps = 500": "write checkpoint.every",
    "save_total_limit = 2": "write checkpoint.keep",
    "resume_from_checkpoint = true": "--resume PATH names another",
    "seed = 42": "write train.seed",
    "tensor_model_parallel_size = 2": "write mesh.tp",
    "sequence_parallel = true": "it is a key of [sharding.tensor_parallel]; write sequence_parallel there",
    "gradient_checkpointing = true": "what is recomputed is a plugin of the family scheduling",
    "parallelism.tp = 2": "how a model is divided stands in mesh and in tables of plugins",
    "model.pretrained = 'gpt2'": '[model] unknown key "pretrained"; write hf',
    "mesh.zero = 3": '[mesh] unknown key "zero"; it is a key of [sharding.fsdp2]; write zero there',
    "mesh.tp_size = 2": '[mesh] unknown key "tp_size"; write tp',
    "sharding.zero3 = {}": 'no plugin "zero3" is installed; it is a key of [sharding.fsdp2]; write zero there',
    "sharding = { zero = 3 }": '[sharding] "zero" must be a table; it is a key of [sharding.fsdp2]; write zero there',
    'sharding = "fsdp2"': "[sharding.NAME]; write [sharding.fsdp2]; NAME is one of",
    "sharding.fsdp2.stage = 3": '[sharding.fsdp2] unknown key "stage"; write zero',
    # Of another table of ours.
    "train.seq_len = 16": '[train] unknown key "seq_len"; write data.seq_len',
    "seq_len = 16": '[seq_len] unknown table "seq_len"; write data.seq_len',
    "checkpoint.grad_clip = 1.0": '[checkpoint] unknown key "grad_clip"; write train.grad_clip',
    'optimizer = "adamw_torch"': 'use = "adamw_torch" is not adamw, sgd, muon or "module:Class"; write "adamw"',
    'optimizer = "adam"': 'write "torch.optim:Adam"',
    'lr_schedule = "cosine_with_warmup"': 'write "cosine"',
}


@pytest.mark.parametrize("line", ELSEWHERE)
def test_keys_of_other_systems_are_answered_with_ours_and_their_line(line):
    with pytest.raises(composer3d.ManifestError) as caught:
        type_manifest(read_text(f"composer3d = 1\ntrain.steps = 2\n{line}\n", "run.toml"), tables=TABLES)
    (problem,) = caught.value.problems
    assert str(problem).startswith("run.toml:3:") and ELSEWHERE[line] in str(problem)


@pytest.mark.parametrize("line", UNKNOWN)
def test_what_is_called_otherwise_elsewhere(folder, command, line):
    (folder / "run.toml").write_text(f"composer3d = 1\n{line}\n" + ("" if "train" in line else "train.steps = 2\n"))
    code, out, err = command("check", "run.toml")
    assert (code, out) == (2, "")
    assert UNKNOWN[line] in err


def test_dotted_keys_below_a_header(edited, command):
    edited(new="train.seed = 3\n")
    assert command("check", "run.toml") == (
        2,
        "",
        'run.toml:16:1: [sharding.fsdp2] unknown key "train"; below the header [sharding.fsdp2] a line train.seed '
        "belongs to it; write it above the first header, or under [train]\n1 problem\n",
    )


def test_misspelt_commands(command):
    assert command("chekc", "run.toml") == (2, "", 'there is no command "chekc"; did you mean "check"?\n')
    assert command("run.toml") == (2, "", 'there is no command "run.toml"; to train write composer3d run run.toml\n')
    assert "one of: calibrate, check," in command("zzz")[2]


def test_versions(command):
    import torch

    code, out, err = command("--version")
    assert (code, err) == (0, "")
    assert out == f"composer3d {composer3d.__version__}, torch {torch.__version__}\n"


def test_version_imports_no_torch():
    code = "import sys; from composer3d.cli import main; main(['--version']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200, check=True)
    assert done.stdout.endswith("\nFalse\n"), done.stdout + done.stderr


def test_what_init_writes_names_its_schema(folder, command):
    assert command("init", "quickstart", "--to", "own.toml") == (
        0,
        "wrote own.toml, and composer3d.schema.json for editors; next: composer3d check own.toml\n",
        "",
    )
    assert (folder / "own.toml").read_text().startswith("#:schema composer3d.schema.json\n")
    schema = json.loads((folder / "composer3d.schema.json").read_text())
    assert schema["properties"]["train"]["$ref"].endswith("TrainTable")
    assert "anyOf" not in json.dumps({name: sorted(entry) for name, entry in schema["properties"].items()})
    assert command("check", "own.toml")[0] == 0
