"""torchtitan's TOML as manifests of runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d import import_config
from composer3d.runner import TABLES
from composer3d.runner.objective.lr_schedule import multiplier_of

WHOLE = """[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
decay_ratio = 0.5
[training]
local_batch_size = 4
global_batch_size = 64
seq_len = 1024
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
[mx]
filter_fqns = ["output"]
"""


def test_a_run(tmp_path):
    translation = translated(tmp_path, "run.toml", WHOLE)
    manifest = manifest_of(translation)
    model = {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
    assert manifest == {
        "composer3d": 1,
        "run": {"output": "./outputs"},
        "mesh": {"dp_replicate": 2, "tp": 2},
        "model": {
            "use": "composer3d.models:llama",
            "args": {**model, "vocab_size": 128256, "max_seq_len": 1024},
        },
        "data": {"use": "FILL_IN:data", "seq_len": 1024},
        "train": {"steps": 1000, "microbatch": 4, "global_batch": 64, "grad_clip": 1.0},
        "optimizer": {
            "use": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "groups": [{"match": ".", "weight_decay": 0.1}],
        },
        "lr_schedule": {"use": "wsd", "warmup": 100, "decay": 500, "min_ratio": 0.0},
        "sharding": {
            "fsdp2": {"zero": 3},
            "tensor_parallel": {"plan": "auto", "sequence_parallel": True, "loss_parallel": True},
        },
        "scheduling": {
            "activation_checkpoint": {"mode": "selective", "policy": "every_second_product"},
            "compile": {"backend": "inductor"},
        },
        "precision": {
            "mixed": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
            "float8": {"recipe": "tensorwise", "all_gather": True, "exclude": ["*output*"]},
        },
    }
    verdicts = verdicts_of(translation)
    assert verdicts["mx.filter_fqns"] == "ignored-there"
    assert verdicts["training.dataset"] == "missing"
    assert verdicts["compile.enable"] == "carried"


def test_it_passes_check(tmp_path):
    file = tmp_path / "small.toml"
    small = WHOLE.replace("llama3", "mine").replace("[model]", "[debug]\nseed = 7\n[model]")
    file.write_text(small.replace("local_batch_size = 4\nglobal_batch_size = 64", "local_batch_size = 1"))
    result = import_config(file, world_size=8, model="composer3d.models:llama", data="synthetic", allow=[])
    assert [str(problem) for problem in result.problems if problem.severity == "error"] == []
    assert result.ok and "seed = 7  # from debug.seed = 7" in result.manifest


@pytest.mark.parametrize(
    ("ratio", "kind", "expected"),
    [
        (None, "linear", lambda s: min((s + 1) / 4, (12 - s) / 8)),
        (0.25, "linear", lambda s: min((s + 1) / 4, 1, (12 - s) / 3)),
        (0.0, "linear", lambda s: min((s + 1) / 4, 1)),
        (0.25, "sqrt", lambda s: min((s + 1) / 4, 1 - math.sqrt(max(s - 9, 0) / 3))),
        (0.25, "cosine", lambda s: min((s + 1) / 4, 0.5 * (1 + math.cos(math.pi * max(s - 9, 0) / 3)))),
    ],
)
def test_rates_are_torchtitans(tmp_path, ratio, kind, expected):
    stated = "" if ratio is None else f"decay_ratio = {ratio}\n"
    text = f"[training]\nsteps = 12\n[lr_scheduler]\nwarmup_steps = 4\ndecay_type = '{kind}'\n{stated}"
    written = manifest_of(translated(tmp_path, "run.toml", text))["lr_schedule"]
    rate = multiplier_of(TABLES["lr_schedule"](**written), num_steps=12, folder=Path("."))
    assert [rate(step) for step in range(12)] == pytest.approx([expected(step) for step in range(12)])


def test_a_fall_that_ends_elsewhere_than_the_run(tmp_path):
    text = "[training]\nsteps = 12\n[lr_scheduler]\nwarmup_steps = 4\ntotal_steps = 20\n"
    translation = translated(tmp_path, "run.toml", text)
    assert verdicts_of(translation)["lr_scheduler.total_steps"] == "carried"
    rate = multiplier_of(
        TABLES["lr_schedule"](**manifest_of(translation)["lr_schedule"]), num_steps=12, folder=tmp_path
    )
    assert [rate(step) for step in range(4, 12)] == pytest.approx([(20 - step) / 16 for step in range(4, 12)])


def test_a_pipeline_counts_its_own_micro_batches(tmp_path):
    text = "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 2\n"
    assert verdicts_of(translated(tmp_path, "run.toml", text))["training.local_batch_size"] == "refused"
    silent = text.replace("local_batch_size = 8\n", "")
    assert verdicts_of(translated(tmp_path, "run.toml", silent))["parallelism.pipeline_parallel_degree"] == "refused"
    translation = translated(tmp_path, "run.toml", text, world_size=8)
    assert manifest_of(translation)["train"]["microbatch"] == 1
    assert manifest_of(translation)["train"]["global_batch"] == 32
    assert manifest_of(translation)["sharding"]["fsdp2"]["zero"] == 2


def test_keys_of_older_versions(tmp_path):
    text = """[training]
batch_size = 2
warmup_steps = 10
data_parallel_degree = -1
tensor_parallel_degree = 2
compile = true
[experimental]
pipeline_parallel_degree = 1
[checkpoint]
enable_checkpoint = true
interval = 10
"""
    manifest = manifest_of(translated(tmp_path, "run.toml", text))
    assert manifest["train"]["microbatch"] == 2 and manifest["lr_schedule"]["warmup"] == 10
    assert manifest["mesh"] == {"dp_shard": -1, "tp": 2}
    assert manifest["checkpoint"] == {"every": 10, "keep": 10, "asynchronous": False}
    assert "compile" in manifest["scheduling"]


@pytest.mark.parametrize(
    ("kind", "every", "verdicts"), [("steps", 60, ("carried", "equal")), ("seconds", None, ("missing", "missing"))]
)
def test_an_interval_in_seconds_is_not_one_in_steps(tmp_path, kind, every, verdicts):
    text = f'[checkpoint]\nenable_checkpoint = true\ninterval = 60\ninterval_type = "{kind}"\n'
    translation = translated(tmp_path, "job.toml", text, system="torchtitan", target="run")
    assert manifest_of(translation).get("checkpoint", {}).get("every") == every
    told = verdicts_of(translation)
    assert (told["checkpoint.interval"], told["checkpoint.interval_type"]) == verdicts
