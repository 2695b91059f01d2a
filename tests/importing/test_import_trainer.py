"""Arguments of transformers' Trainer, and its file of FSDP's options, as manifests."""

from __future__ import annotations

import json

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d.importing.recognition import recognise

ARGUMENTS = {
    "model_name_or_path": "folder/of/a/model",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-4,
    "weight_decay": 0.05,
    "max_steps": 300,
    "warmup_steps": 30,
    "lr_scheduler_type": "cosine",
    "bf16": True,
    "gradient_checkpointing": True,
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"], "forward_prefetch": "true", "xla": False},
    "report_to": ["tensorboard"],
    "save_total_limit": 2,
    "lerning_rate": 1,
}


def test_a_run_has_the_trainers_defaults(tmp_path):
    translation = translated(tmp_path, "args.json", json.dumps(ARGUMENTS), world_size=8)
    assert translation.table.name == "trainer"
    assert manifest_of(translation) == {
        "composer3d": 1,
        "run": {"log_every": 500},
        "model": {"hf": "folder/of/a/model"},
        "data": {"use": "FILL_IN:data"},
        "train": {"microbatch": 2, "global_batch": 64, "steps": 300, "grad_clip": 1.0},
        "optimizer": {"use": "adamw", "lr": 1e-4, "weight_decay": 0.05, "betas": [0.9, 0.999], "eps": 1e-8},
        "lr_schedule": {"use": "cosine", "warmup": 30, "min_ratio": 0.0},
        "checkpoint": {"every": 500, "keep": 2},
        "sharding": {"fsdp2": {"zero": 3, "forward_prefetch": 1}, "cpu_offload": {"mode": "all"}},
        "scheduling": {"activation_checkpoint": {"mode": "full"}},
        "precision": {"mixed": {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "bfloat16"}},
        "profiling": {"tensorboard": {}},
    }
    verdicts = verdicts_of(translation)
    assert verdicts["lr_scheduler_type"] == "changed" and verdicts["lerning_rate"] == "ignored-there"
    assert 'did you mean "learning_rate"?' in translation.verdicts["lerning_rate"].note


def test_a_loop_takes_the_trainers_own_schedule(tmp_path):
    translation = translated(tmp_path, "args.json", json.dumps(ARGUMENTS), target="compose")
    assert 'transformers.get_scheduler("cosine", optimizer, num_warmup_steps=30' in translation.loop[-1]
    assert any(line.startswith("with run.accumulate(4):") for line in translation.loop)


@pytest.mark.parametrize(
    ("content", "key", "verdict"),
    [
        ({"optim": "adafactor"}, "optim", "refused"),
        ({"optim": "adamw_torch_8bit"}, "optim", "changed"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", "refused"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor", "refused"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type", "refused"),
        ({"num_train_epochs": 3}, "num_train_epochs", "missing"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "refused"),
        ({"hub_token": "hf_hidden"}, "hub_token", "meaningless"),
    ],
)
def test_verdicts_of_single_keys(tmp_path, content, key, verdict):
    translation = translated(tmp_path, "args.json", json.dumps(content), system="trainer")
    assert verdicts_of(translation)[key] == verdict
    assert "hf_hidden" not in str(translation.verdicts[key].value)


def test_the_file_of_fsdps_options(tmp_path):
    text = json.dumps({"fsdp_transformer_layer_cls_to_wrap": "Block", "activation_checkpointing": True, "xla": False})
    assert recognise(tmp_path / "fsdp.json", text)[0] == "fsdp"
    translation = translated(tmp_path, "fsdp.json", text)
    assert manifest_of(translation) == {
        "composer3d": 1,
        "sharding": {"fsdp2": {"zero": 3}},
        "scheduling": {"activation_checkpoint": {"mode": "full"}},
    }
    assert verdicts_of(translated(tmp_path, "xla.json", '{"xla": "true"}', system="fsdp"))["xla"] == "refused"
