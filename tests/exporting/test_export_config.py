"""`composer3d export` of a manifest: what is written means the same, and what cannot be said is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli
from support.documents import code, read, table

from composer3d.cli import main
from composer3d.exporting import export_config, targets
from composer3d.importing import Options, load_key_table, parse, translate_tree, write_manifest
from composer3d.manifest import read as read_manifest
from composer3d.manifest import shipped

FORMS = {"deepspeed": "json", "accelerate": "yaml", "torchtitan": "toml"}
GOOD = ("carried", "equal", "meaningless")

PLUGINS = """composer3d = 1
[mesh]
dp_shard = 4
dp_replicate = 2
[train]
microbatch = 2
global_batch = 32
[sharding.fsdp2]
zero = 3
"""
RUN = """composer3d = 1
[model]
use = "composer3d.models:llama"
[data]
use = "synthetic"
seq_len = 128
[train]
steps = 60
microbatch = 2
accumulate = 4
seed = 7
grad_clip = 0.5
[optimizer]
lr = 2e-3
betas = [0.8, 0.9]
weight_decay = 0.0
[lr_schedule]
use = "constant"
[run]
log_every = 5
output = "runs/other"
[sharding.fsdp2]
zero = 2
forward_prefetch = 1
[precision.mixed]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(text, to, **options):
    Path("m.toml").write_text(text)
    return export_config("m.toml", to=to, **options)


def verdicts(result):
    return {entry.key: str(entry.verdict) for entry in result.keys}


def settings(text, system, *, target, world_size=None):
    """What a file of another system becomes, without reasons."""
    tree = parse(text, "file", form=FORMS[system])
    translation = translate_tree(system, tree, Options(target=target, world_size=world_size))
    return {path: setting.value for path, setting in translation.settings.items()}, translation


@pytest.mark.parametrize("to", targets())
@pytest.mark.parametrize("name", sorted(shipped()))
def test_no_key_of_a_manifest_is_dropped(name, to):
    result = export_config(name, to=to, world_size=8, allow=[])
    document = read_manifest(name)
    stated = {
        (table, key) for table, keys in document.tables.items() for key in (keys if isinstance(keys, dict) else {})
    }
    assert stated
    for path in stated:
        key = ".".join(path)
        assert any(entry.key == key or entry.key.startswith(f"{key}.") for entry in result.keys), key
    assert all(entry.note for entry in result.keys if entry.verdict in ("missing", "changed", "refused"))


@pytest.mark.parametrize("to", targets())
def test_the_written_file_is_read_without_a_key_that_its_system_does_not_have(to):
    result = exported(RUN, to, world_size=8)
    tree = parse(result.text, "file", form=FORMS[to])
    known = load_key_table(to)
    assert [key for key in tree.leaves if known.entry_of(key) is None] == []
    _, translation = settings(result.text, to, target="run", world_size=8)
    useless = {"ignored-there", "refused", "missing"}
    said = [entry for entry in translation.verdicts.values() if not str(entry.value).startswith("FILL_IN:")]
    assert [entry.key for entry in said if str(entry.verdict) in useless] == []


def test_deepspeed_says_batch_optimizer_and_dtypes():
    result = exported(RUN, "deepspeed")
    written = json.loads(result.text)
    assert result.ok and written["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.0},
    }
    assert written["zero_optimization"] == {"stage": 2}
    assert written["gradient_accumulation_steps"] == 4 and "train_batch_size" not in written
    assert written["communication_data_type"] == "fp32" and written["bf16"]["enabled"] is True
    found = verdicts(result)
    for key in ("train.microbatch", "train.accumulate", "train.grad_clip", "optimizer.betas", "run.log_every"):
        assert found[key] == "carried", key
    assert found["precision.mixed"] in GOOD and found["sharding.fsdp2.forward_prefetch"] == "meaningless"
    missing = {key for key, verdict in found.items() if verdict == "missing"}
    assert missing == {"model.use", "data.use", "data.seq_len", "train.steps", "train.seed", "run.output"}


def test_defaults_that_the_other_system_has_otherwise_are_named():
    result = exported(RUN.replace("weight_decay = 0.0\n", ""), "deepspeed")
    (entry,) = [entry for entry in result.keys if entry.key == "optimizer.groups"]
    assert (str(entry.verdict), entry.line) == ("changed", None)
    assert "'weight_decay': 0.1" in entry.note and "norms and biases" in entry.note


@pytest.mark.parametrize("warmup", [4, 10])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_of_a_near_form_says_where_it_differs_most(kind, warmup):
    result = exported(RUN.replace('use = "constant"', f'use = "{kind}"\nwarmup = {warmup}'), "deepspeed")
    entry = next(entry for entry in result.keys if entry.key == "lr_schedule.use")
    assert str(entry.verdict) == "changed" and "x lr there in step" in entry.note
    here, there = (float(part.split(" x lr")[0].split()[-1]) for part in entry.note.split(",")[:2])
    assert 0 < abs(here - there) <= 2 / warmup


DEEPSPEED = {
    "stages": '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,'
    ' "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "bf16": {"enabled": true}}',
    "float16": '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization":'
    ' {"stage": 1}, "fp16": {"enabled": true, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2},'
    ' "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.01}}, "scheduler": {"type":'
    ' "WarmupDecayLR", "params": {"warmup_num_steps": 20, "total_num_steps": 200, "warmup_max_lr": 1e-4}}}',
    "offloaded": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_param": {"device":'
    ' "cpu"}, "offload_optimizer": {"device": "cpu"}}, "fp16": {"enabled": true, "loss_scale": 128},'
    ' "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}}',
    "l2": '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"adam_w_mode": false,'
    ' "eps": 1e-6, "weight_decay": 0.1, "amsgrad": true}}}',
    "axes": '{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}, "zero_optimization":'
    ' {"stage": 2}, "sequence_parallel_size": 2, "communication_data_type": "fp32", "bf16": {"enabled": true},'
    ' "steps_per_print": 3, "wandb": {"enabled": true, "project": "p", "group": "g"}}',
    "cosine": '{"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},'
    ' "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 9, "total_num_steps": 90,'
    ' "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_type": "linear"}}}',
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_deepspeed_file_comes_back_with_the_same_settings(name):
    comes_back(DEEPSPEED[name], "deepspeed", target="run" if "optimizer" in DEEPSPEED[name] else "compose")


def comes_back(text, system, *, target, world_size=None):
    """Import, export and import again; a manifest of a loop has what a loop is given, one of a run has all."""
    before, translation = settings(text, system, target=target)
    for path, setting in list(translation.settings.items()):
        if str(setting.value).startswith("FILL_IN"):
            stand_in = {"train.steps": 50, "data.use": "synthetic"}.get(path, "composer3d.models:llama")
            translation.put(path, stand_in)
            del before[path]
    result = exported(write_manifest(translation), system, world_size=world_size)
    assert result.ok, result
    after, again = settings(result.text, system, target=target)
    kept = {path: value for path, value in after.items() if again.is_kept(path) and "FILL_IN" not in str(value)}
    if "train.steps" not in before:
        kept.pop("train.steps", None)
    assert kept == {path: value for path, value in before.items() if translation.is_kept(path)}
    lost = {entry.key for entry in result.keys if str(entry.verdict) not in GOOD}
    assert lost <= {"model.use", "data.use", "train.steps"}, result


ACCELERATE = {
    "fsdp": "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmixed_precision: bf16\nfsdp_config:\n"
    "  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n"
    "  fsdp_activation_checkpointing: true\n  fsdp_forward_prefetch: true\n",
    "replicated": "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: 'no'\n"
    "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n"
    "  dynamo_use_regional_compilation: true\n",
    "axes": "distributed_type: FSDP\nnum_processes: 16\nmixed_precision: fp16\nfsdp_config:\n  fsdp_version: 2\n"
    "  fsdp_auto_wrap_policy: NO_WRAP\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
    "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n",
    "float8": "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: fp8\nfsdp_config:\n  fsdp_version: 2\n"
    "fp8_config:\n  backend: AO\n  enable_fsdp_float8_all_gather: false\n",
}


@pytest.mark.parametrize("name", ACCELERATE)
def test_an_accelerate_file_comes_back_with_the_same_settings(name):
    pytest.importorskip("yaml")
    comes_back(ACCELERATE[name], "accelerate", target="compose", world_size={"axes": 16, "fsdp": 8}.get(name))


TORCHTITAN = {
    "3d": "[training]\nsteps = 300\nlocal_batch_size = 4\nglobal_batch_size = 64\nseq_len = 4096\nmax_norm = 0.5\n"
    "[optimizer]\nlr = 1e-3\nbeta2 = 0.99\nweight_decay = 0.05\n[lr_scheduler]\nwarmup_steps = 20\ndecay_ratio = 0.3\n"
    "decay_type = 'cosine'\nmin_lr_factor = 0.2\n[parallelism]\ndata_parallel_shard_degree = 4\n"
    "tensor_parallel_degree = 2\ncontext_parallel_degree = 2\n[activation_checkpoint]\nmode = 'selective'\n"
    "selective_ac_option = '3'\n[compile]\nenable = true\ncomponents = ['model']\n",
    "pipeline": "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nsteps = 100\nlocal_batch_size = 8\n"
    "[optimizer]\nname = 'Adam'\nweight_decay = 0.0\n[parallelism]\npipeline_parallel_degree = 2\n"
    "data_parallel_shard_degree = 2\npipeline_parallel_microbatch_size = 2\n"
    "pipeline_parallel_schedule = 'Interleaved1F1B'\n[activation_checkpoint]\nmode = 'full'\n"
    "[checkpoint]\nenable = true\ninterval = 7\nasync_mode = 'async'\n",
    "replicated": "[training]\nsteps = 100\nmixed_precision_param = 'float32'\n[lr_scheduler]\ndecay_ratio = 0.0\n"
    "[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 2\n"
    "[activation_checkpoint]\nmode = 'none'\n[metrics]\nlog_freq = 3\nenable_wandb = true\n",
    "float8": "[model]\nconverters = ['quantize.linear.float8']\n[training]\nsteps = 50\nenable_cpu_offload = true\n"
    "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\nfilter_fqns = ['output', 'router']\n"
    "[debug]\nseed = 3\n[activation_checkpoint]\nmode = 'memory_budget'\nmemory_budget = 0.7\n",
}


@pytest.mark.parametrize("name", TORCHTITAN)
def test_a_torchtitan_file_comes_back_with_the_same_settings(name):
    comes_back(TORCHTITAN[name], "torchtitan", target="run")


def test_a_model_and_data_that_torchtitan_does_not_have_are_to_be_filled_in():
    result = exported(RUN, "torchtitan", world_size=2)
    written = tomli.loads(result.text)
    assert written["debug"] == {"seed": 7} and "seed" not in written["training"]
    assert written["model"]["name"] == "FILL_IN:model" and written["training"]["dataset"] == "FILL_IN:data"
    sizes = "dim = 4096, num_layers = 32, num_heads = 32, num_kv_heads = 8, ffn_dim = 14336, vocab_size = 128256"
    text = RUN.replace("[data]", f"args = {{ {sizes}, max_seq_len = 128 }}\n[data]")
    result = exported(text, "torchtitan", world_size=2)
    assert tomli.loads(result.text)["model"] == {"name": "llama3", "flavor": "8B"}
    assert verdicts(result)["model.args"] == verdicts(result)["model.use"] == "carried"


def test_the_default_schedule_is_torchtitans_own_formula():
    text = RUN.replace('use = "constant"', 'use = "wsd"\nwarmup = 10')
    found = verdicts(exported(text, "torchtitan", world_size=2))
    assert found["lr_schedule.use"] == found["lr_schedule.warmup"] == "carried"


def test_float16_has_its_scale_under_deepspeed_and_is_changed_under_torchtitan():
    text = RUN.replace("[precision.mixed]", '[precision.mixed]\nparam_dtype = "float16"')
    result = exported(text, "deepspeed")
    written = json.loads(result.text)["fp16"]
    assert written["loss_scale_window"] == 2000 and written["min_loss_scale"] == 1  # of which DeepSpeed takes no part
    assert [entry.key for entry in result.keys if "precision" in entry.key and str(entry.verdict) not in GOOD] == [
        "precision.mixed.min_scale"
    ]
    (entry,) = [e for e in exported(text, "torchtitan").keys if e.key == "precision.mixed.param_dtype"]
    assert (str(entry.verdict), entry.note) == ("changed", "float16 here, bfloat16 there")


def test_an_optimizer_that_torchtitan_would_replace_is_refused(capsys):
    text = RUN.replace("[optimizer]", '[optimizer]\nuse = "sgd"').replace("betas = [0.8, 0.9]\n", "")
    result = exported(text, "torchtitan", world_size=2)
    assert not result.ok and result.text == ""
    assert verdicts(result)["optimizer.use"] == "refused"
    assert main(["export", "m.toml", "--to", "torchtitan", "--world-size", "2"]) == 1
    assert "optimizer.use is refused: sgd here, adamw there" in capsys.readouterr().err
    assert exported(text, "torchtitan", world_size=2, allow=["optimizer.use"]).ok


def test_what_a_program_of_accelerate_states_itself_is_named_with_its_numbers():
    result = exported(RUN, "accelerate", world_size=2)
    found = verdicts(result)
    for key in ("optimizer.lr", "train.microbatch", "train.accumulate", "train.grad_clip", "lr_schedule.use"):
        assert found[key] == "missing", key
    assert "optimizer.lr = 0.002, optimizer.betas = [0.8, 0.9]" in str(result.problems[0])
    assert "train.accumulate = 4, train.grad_clip = 0.5" in str(result.problems[0])
    (entry,) = [entry for entry in result.keys if entry.key == "precision.mixed.reduce_dtype"]
    assert (str(entry.verdict), entry.note.split(";")[0]) == ("changed", "float32 here, bfloat16 there")


def test_zero_1_is_changed_under_accelerate_with_both_numbers():
    result = exported(PLUGINS.replace("zero = 3", "zero = 1"), "accelerate")
    (entry,) = [entry for entry in result.keys if entry.key == "sharding.fsdp2.zero"]
    assert str(entry.verdict) == "changed" and entry.note.startswith("1 here, 2 there")


def test_an_optimizer_that_the_other_system_does_not_have_is_missing():
    text = RUN.replace("[optimizer]", '[optimizer]\nuse = "torch.optim:Adafactor"').replace("betas = [0.8, 0.9]\n", "")
    text = text.replace('use = "constant"', 'use = "inverse_sqrt"')
    result = exported(text.replace("torch.optim:Adafactor", "torch.optim.adamax:Adamax"), "deepspeed")
    found = verdicts(result)
    assert found["optimizer.use"] == found["optimizer.lr"] == found["lr_schedule.use"] == "missing"
    assert "give torch.optim.adamax:Adamax to deepspeed.initialize" in str(result.problems[0])


def test_a_manifest_of_a_loop_says_nothing_of_the_optimizer():
    result = exported(PLUGINS, "deepspeed")
    assert "optimizer" not in json.loads(result.text)
    assert json.loads(result.text)["zero_optimization"]["mics_shard_size"] == 4
    assert set(verdicts(result).values()) <= {"carried", "equal"}
    assert "the norm to which the loop clips" in str(result.problems[0])


@pytest.mark.parametrize("to", targets())
def test_the_command_writes_the_file_and_reports(to, capsys):
    Path("m.toml").write_text(RUN)
    assert main(["export", "m.toml", "--to", to, "--world-size", "4", "--output", "out.txt", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["composer3d", "ok", "target", "keys", "file", "problems"]
    assert report["file"] == Path("out.txt").read_text() and report["target"]["system"] == to
    assert set(report["keys"][0]) == {"key", "line", "value", "verdict", "to", "note"}
    assert main(["export", "m.toml", "--to", to, "--output", "out.txt"]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m.toml", "--to", "deepspeeed"], 'did you mean "deepspeed"?'),
        (["runs/x", "--to", "deepspeed"], "--to ./deepspeed for a folder of that name"),
        (["m.toml", "--to", "deepspeed", "--merge"], "--merge is of checkpoints"),
        (["m.toml", "--to", "deepspeed", "--max-shard", "1GiB"], "--max-shard is of checkpoints"),
        (["runs/x", "--to", "out", "--json"], "--json is of manifests"),
    ],
)
def test_sources_and_targets_of_both_kinds_are_not_mixed_up(words, said, capsys):
    Path("m.toml").write_text(RUN)
    assert main(["export", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["m.toml"]


def test_a_key_that_is_allowed_and_not_refused_is_a_mistake(capsys):
    Path("m.toml").write_text(RUN)
    assert main(["export", "m.toml", "--to", "deepspeed", "--allow", "train.seed"]) == 1
    assert "--allow train.seed: no such key is refused" in capsys.readouterr().err


def test_the_readme_names_every_system():
    rows = table(read("composer3d/exporting/README.md"), "`--to`", "file", "not in it")
    assert sorted(code(row[0])[0] for row in rows) == sorted(targets())


@pytest.mark.parametrize(
    ("axis", "plugin", "stage"),
    [("pp", "[scheduling.pipeline]\n", 1), ("tp", "[sharding.tensor_parallel]\n", 2), ("cp", "", 3)],
)
def test_deepspeed_is_given_a_stage_that_it_has_beside_the_layout(axis, plugin, stage):
    text = PLUGINS.replace("dp_replicate = 2", f"{axis} = {1 if axis == 'cp' else 2}") + plugin
    result = exported(text, "deepspeed", world_size=8)
    assert json.loads(result.text)["zero_optimization"]["stage"] == stage
    assert any("refuses stage 3" in problem.message for problem in result.problems) == (stage < 3)


def test_accelerate_has_the_ranks_of_one_stage():
    text = PLUGINS.replace("dp_replicate = 2", "pp = 2") + "[scheduling.pipeline]\n"
    result = exported(text, "accelerate", world_size=8)
    assert "num_processes: 4" in result.text
