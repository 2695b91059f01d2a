"""axolotl, NeMo Automodel and GPT-NeoX as manifests."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d import ManifestError
from composer3d.runner import TABLES
from composer3d.runner.objective.lr_schedule import multiplier_of

AXOLOTL = """base_model: folder/of/a/model
datasets:
  - path: some/data
    type: alpaca
sequence_len: 2048
sample_packing: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 50
optimizer: adamw_torch_fused
learning_rate: 2e-4
warmup_steps: 5
cosine_min_lr_ratio: 0.1
bf16: auto
gradient_checkpointing: true
dp_shard_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
  offload_params: false
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
val_set_size: 0.05
wandb_project: mine
wandb_entity:
saves_per_epoch: 1
microbatch_size: 3
"""


def test_axolotl_under_the_trainers_rules(tmp_path):
    translation = translated(tmp_path, "config.yaml", AXOLOTL, world_size=4)
    assert translation.table.name == "axolotl"
    assert manifest_of(translation) == {
        "composer3d": 1,
        "run": {"log_every": 500},
        "mesh": {"dp_shard": 2, "tp": 2},
        "model": {"hf": "folder/of/a/model"},
        "data": {
            "seq_len": 2048,
            "evaluation_fraction": 0.05,
            "use": "FILL_IN:data",
            "chat": {"trained": "assistant", "packing": True, "too_long": "drop"},
        },
        "train": {"microbatch": 2, "global_batch": 16, "steps": 50, "grad_clip": 1.0},
        "optimizer": {"use": "adamw", "lr": 2e-4, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8},
        "lr_schedule": {"min_ratio": 0.1, "use": "cosine", "warmup": 5, "warmup_start": 0.0},
        "sharding": {
            "tensor_parallel": {"plan": "auto"},
            "fsdp2": {"zero": 3, "unit_classes": ["LlamaDecoderLayer"]},
        },
        "scheduling": {"activation_checkpoint": {"mode": "full"}},
        "precision": {
            "qlora": {
                "quantize": "nf4",
                "rank": 8,
                "alpha": 16.0,
                "dropout": 0.05,
                "modules": ["**.q_proj", "**.v_proj"],
            },
            "mixed": {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "bfloat16"},
        },
        "profiling": {"wandb": {"project": "mine"}},
    }
    names = {entry.key: str(entry.verdict) for entry in translation.verdicts.values()}
    assert names["micro_batch_size"] == "carried" and names["datasets"] == "missing"
    assert names["microbatch_size"] == "ignored-there" and names["saves_per_epoch"] == "missing"


@pytest.mark.parametrize(
    ("line", "key", "verdict"),
    [
        ("rl: dpo", "rl", "refused"),
        ("relora: true", "relora", "refused"),
        ("peft_use_dora: true\nadapter: lora", "peft_use_dora", "refused"),
        ("deepspeed: ds.json", "deepspeed", "refused"),
        ("noisy_embedding_alpha: 5", "noisy_embedding_alpha", "refused"),
        ("trainer_cls: my.Trainer", "trainer_cls", "refused"),
        ("activation_offloading: legacy", "activation_offloading", "carried"),
        ("fp32_norms: true", "fp32_norms", "carried"),
        ("flash_attention: true", "flash_attention", "meaningless"),
        ("liger_fused_linear_cross_entropy: true", "liger_fused_linear_cross_entropy", "meaningless"),
        ("liger_use_token_scaling: true", "liger_use_token_scaling", "missing"),
    ],
)
def test_single_keys_of_axolotl(tmp_path, line, key, verdict):
    translation = translated(tmp_path, "config.yaml", f"base_model: m\n{line}\n")
    assert verdicts_of(translation)[key] == verdict


AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 8, ckpt_every_steps: 100, val_every_steps: 10, max_steps: 500}
dist_env: {backend: nccl, timeout_minutes: 2}
rng: {_target_: nemo_automodel.components.training.rng.StatefulRNG, seed: 1111, ranked: true}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: folder/of/a/model
  torch_dtype: bf16
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1, pp_size: 2, sequence_parallel: true,
  activation_checkpointing: true, pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 1, layers_per_stage: 2}}
fp8: {enabled: true, recipe_name: rowwise, filter_fqns: [lm_head]}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
dataset: {_target_: touch.executed, split: train}
dataloader: {_target_: torchdata.stateful_dataloader.StatefulDataLoader, shuffle: false}
optimizer: {_target_: torch.optim.Adam, betas: [0.9, 0.95], eps: 1e-8, lr: 1.0e-5, weight_decay: 0.01}
lr_scheduler: {lr_decay_style: cosine, min_lr: 1.0e-6}
"""


def test_a_recipe_of_automodel(tmp_path):
    translation = translated(tmp_path, "recipe.yaml", AUTOMODEL)
    assert translation.table.name == "automodel"
    manifest = manifest_of(translation)
    assert manifest["mesh"] == {"pp": 2, "tp": 2}
    assert manifest["model"] == {"hf": "folder/of/a/model", "dtype": "bfloat16"}
    assert manifest["train"] == {"microbatch": 1, "global_batch": 64, "steps": 500, "grad_clip": 1.0, "seed": 1111}
    assert manifest["optimizer"] == {
        "use": "torch.optim:Adam",
        "lr": 1e-5,
        "weight_decay": 0.01,
        "args": {"betas": [0.9, 0.95], "eps": 1e-8},
        "groups": [{"match": ".", "weight_decay": 0.01}],
    }
    assert manifest["lr_schedule"] == {
        "use": "cosine",
        "warmup": 50,
        "warmup_start": 0.1,
        "min_ratio": pytest.approx(0.1),
    }
    assert manifest["sharding"] == {
        "fsdp2": {"zero": 2},  # blocks of a pipeline are not resharded
        "tensor_parallel": {"sequence_parallel": True},
    }
    assert manifest["scheduling"] == {
        "activation_checkpoint": {"mode": "full"},
        "pipeline": {"schedule": "Interleaved1F1B"},
    }
    assert manifest["precision"]["float8"]["recipe"] == "rowwise"
    assert manifest["precision"]["float8"]["exclude"] == ["**lm_head**"]
    assert manifest["run"] == {"timeout_s": 120.0}
    verdicts = verdicts_of(translation)
    assert verdicts["dataset._target_"] == "missing" and verdicts["loss_fn._target_"] == "equal"


NEOX = """{
  "pipe-parallel-size": 2, "model_parallel_size": 2,
  "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "pos_emb": "rotary",
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.0001, "zero_optimization": {"stage": 1, "allgather_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "weight_decay": 0.1,
  "fp16": {"enabled": true, "type": "bfloat16", "loss_scale": 0}, "checkpoint_activations": true,
  "train_iters": 1000, "lr_decay_iters": 1000, "lr_decay_style": "cosine", "warmup": 0.01,
  "checkpoint_factor": 100, "seqlen": 5,  # a comment
}
"""


@pytest.mark.parametrize("name", ["num_layers: 4", "hidden-size: 64", "lr_decay_style: linear", "train_iters: 40"])
def test_a_part_of_gpt_neoxs_file_is_told_by_a_name_of_its_own(tmp_path, name):
    shared = "train_batch_size: 32\nbf16: {enabled: true}\ngradient_accumulation_steps: 1\noptimizer: {type: sgd}\n"
    assert translated(tmp_path, "part.yml", f"{shared}{name}\n", world_size=1).table.name == "neox"
    said = (
        "no system is recognised by its keys: train_batch_size, bf16, gradient_accumulation_steps are DeepSpeed's and "
        "GPT-NeoX's; write --from neox, if it is a part of GPT-NeoX's YAML, or --from deepspeed"
    )
    with pytest.raises(ManifestError, match=said):
        translated(tmp_path, "part.yml", shared, world_size=1)


def test_gpt_neox(tmp_path):
    translation = translated(tmp_path, "neox.yml", NEOX, world_size=8)
    assert translation.table.name == "neox"
    manifest = manifest_of(translation)
    assert manifest["mesh"] == {"pp": 2, "tp": 2}
    assert manifest["train"] == {"microbatch": 4, "global_batch": 16, "grad_clip": 1.0, "steps": 1000, "seed": 1234}
    assert manifest["optimizer"] == {
        "use": "adamw",
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "lr": 0.001,
        "weight_decay": 0.1,
    }
    assert manifest["lr_schedule"] == {
        "use": "cosine",
        "warmup": 10,
        "warmup_start": 0.0,
        "min_ratio": pytest.approx(0.1),
    }
    assert manifest["precision"]["mixed"]["param_dtype"] == "bfloat16"
    assert manifest["checkpoint"] == {"every": 100, "keep": 1_000_000}
    keys = {entry.key: str(entry.verdict) for entry in translation.verdicts.values()}
    assert keys["pipe-parallel-size"] == "carried" and keys["seqlen"] == "refused"
    assert keys["zero_optimization.allgather_bucket_size"] == "meaningless"


def test_a_fall_of_gpt_neox_that_ends_before_the_run(tmp_path):
    shorter = NEOX.replace('"lr_decay_iters": 1000', '"lr_decay_iters": 800')
    translation = translated(tmp_path, "neox.yml", shorter, world_size=8)
    assert manifest_of(translation)["lr_schedule"]["decay_end"] == 800
    entry = next(entry for entry in translation.verdicts.values() if entry.key == "lr_decay_iters")
    assert str(entry.verdict) == "changed" and "stays from 792 on there" in entry.note
    constant = shorter.replace('"lr_decay_style": "cosine"', '"lr_decay_style": "constant"')
    assert "decay_end" not in manifest_of(translated(tmp_path, "neox.yml", constant, world_size=8))["lr_schedule"]


def test_a_file_of_automodel_is_not_taken_for_deepspeeds(tmp_path):
    text = "optimizer: {_target_: torch.optim.SGD, lr: 0.1}\ncheckpoint: {enabled: false}\n"
    text += "step_scheduler: {max_steps: 3}\n"
    assert translated(tmp_path, "a.yaml", text).table.name == "automodel"


def test_shapes_of_axolotls_cosine(tmp_path):
    text = AXOLOTL.replace("warmup_steps: 5\n", "warmup_steps: 4\nmax_steps: 20\n")
    translation = translated(tmp_path, "run.yaml", text + "cosine_constant_lr_ratio: 0.8\n")
    rates = _rates(translation, 20)
    waves = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (min(step, 16) - 4) / 12)) for step in range(4, 20)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, *waves])
    verdicts = verdicts_of(translation)
    assert verdicts["cosine_constant_lr_ratio"] == verdicts["cosine_min_lr_ratio"] == "carried"
    translation = translated(tmp_path, "run.yaml", text + "lr_quadratic_warmup: true\n")
    waves = [0.5 * (1 + math.cos(math.pi * (step - 4) / 16)) for step in range(4, 20)]
    assert _rates(translation, 20) == pytest.approx([0, 1 / 16, 1 / 4, 9 / 16, *waves])
    verdicts = verdicts_of(translation)
    assert (verdicts["lr_quadratic_warmup"], verdicts["cosine_min_lr_ratio"]) == ("carried", "ignored-there")


def test_a_fraction_of_warmup_is_rounded_as_axolotl_does(tmp_path):
    text = AXOLOTL.replace("warmup_steps: 5\n", "warmup_ratio: 0.15\n")
    translation = translated(tmp_path, "run.yaml", text)
    assert manifest_of(translation)["lr_schedule"]["warmup"] == 7  # of 50 steps
    assert verdicts_of(translation)["warmup_ratio"] == "carried"
    translation = translated(tmp_path, "run.yaml", text.replace("max_steps: 50\n", ""))
    assert manifest_of(translation)["lr_schedule"]["warmup"] == 0.15
    assert verdicts_of(translation)["warmup_ratio"] == "carried"


def test_automodels_warmup_and_the_end_of_its_fall(tmp_path):
    text = AUTOMODEL.replace("max_steps: 500", "max_steps: 20")
    text = text.replace("min_lr: 1.0e-6}", "min_lr: 1.0e-6, init_lr: 5.0e-6, lr_warmup_steps: 4, lr_decay_steps: 16}")
    translation = translated(tmp_path, "recipe.yaml", text)
    waves = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (min(step, 16) - 4) / 12)) for step in range(4, 20)]
    assert _rates(translation, 20) == pytest.approx([0.5, 0.625, 0.75, 0.875, *waves])
    verdicts = verdicts_of(translation)
    assert verdicts["lr_scheduler.lr_decay_style"] == verdicts["lr_scheduler.lr_decay_steps"] == "carried"
    assert verdicts["lr_scheduler.init_lr"] == "derived"


def _rates(translation, steps):
    rate = multiplier_of(
        TABLES["lr_schedule"](**manifest_of(translation)["lr_schedule"]), num_steps=steps, folder=Path(".")
    )
    return [rate(step) for step in range(steps)]
