"""DeepSpeed's JSON as manifests: a verdict for every key, and the numbers that DeepSpeed computes."""

from __future__ import annotations

import json
import math

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d.importing.importer import import_config
from composer3d.runner import TABLES
from composer3d.runner.objective.lr_schedule import multiplier_of

WHOLE = """{
  // the whole of a run, as people write it
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "gradient_clipping": 0.5,
  "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "weight_decay": 0.01}, "eps": 1e-6},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3, "overlap_comm": true, "zero_hpz_partition_size": 4,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"},
  },
  "scheduler": {
    "type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 2e-4} },
  "steps_per_print": 50, "wall_clock_breakdown": false,
  "zero_optimisation": {"stage": 1},
}
"""


def document(**content):
    return json.dumps(content)


def test_a_manifest_of_a_run_states_every_default_that_differs(tmp_path):
    translation = translated(tmp_path, "ds.json", WHOLE, target="run")
    assert manifest_of(translation) == {
        "composer3d": 1,
        "run": {"log_every": 50},
        "model": {"use": "FILL_IN:model"},
        "data": {"use": "FILL_IN:data"},
        "train": {"global_batch": 64, "microbatch": 4, "grad_clip": 0.5, "steps": 12},
        "optimizer": {
            "use": "adamw",
            "lr": 2e-4,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "groups": [{"match": ".", "weight_decay": 0.01}],
        },
        "lr_schedule": {
            "use": "linear",
            "warmup": 4,
            "warmup_start": 0.0,
            "warmup_shape": "log",
            "warmup_delay": 1,
            "min_ratio": 0.0,
            "decay": 8,
            "decay_end": 13,
        },
        "stability": {"on_nonfinite": "skip"},
        "sharding": {"fsdp2": {"zero": 3, "reshard_after_forward": 4}, "cpu_offload": {"mode": "all"}},
        "precision": {"mixed": {"param_dtype": "bfloat16", "norms": "as_others", "reduce_dtype": "bfloat16"}},
    }
    assert verdicts_of(translation) == {
        "train_batch_size": "carried",
        "train_micro_batch_size_per_gpu": "carried",
        "gradient_accumulation_steps": "derived",
        "gradient_clipping": "carried",
        "optimizer.type": "carried",
        "optimizer.params.lr": "carried",
        "optimizer.params.weight_decay": "carried",
        "optimizer.eps": "ignored-there",
        "bf16.enabled": "carried",
        "zero_optimization.stage": "carried",
        "zero_optimization.overlap_comm": "meaningless",
        "zero_optimization.zero_hpz_partition_size": "carried",
        "zero_optimization.offload_optimizer.device": "carried",
        "zero_optimization.offload_optimizer.pin_memory": "meaningless",
        "zero_optimization.offload_param.device": "carried",
        "scheduler.type": "carried",
        "scheduler.params.total_num_steps": "carried",
        "scheduler.params.warmup_num_steps": "carried",
        "scheduler.params.warmup_max_lr": "carried",
        "steps_per_print": "carried",
        "wall_clock_breakdown": "meaningless",
        "zero_optimisation.stage": "ignored-there",
    }
    notes = {key: entry.note for key, entry in translation.verdicts.items()}
    assert 'did you mean "zero_optimization"?' in notes["zero_optimisation.stage"]
    assert notes["optimizer.eps"].endswith("DeepSpeed reads optimizer.params.eps")
    assert notes["gradient_accumulation_steps"] == "64 = 4 x 2 x 8 data-parallel ranks"


def test_a_loop_has_the_optimizer_clipping_and_schedule_as_its_lines(tmp_path):
    translation = translated(tmp_path, "ds.json", WHOLE, target="compose")
    assert set(manifest_of(translation)) == {"composer3d", "train", "sharding", "precision"}
    from composer3d.importing.commented_manifest import write_manifest

    text = write_manifest(translation)
    assert "optimizer = run.optimizer(torch.optim.AdamW, lr=0.0002, betas=(0.9, 0.999), eps=1e-08, " in text
    assert "run.clip_grad_norm_(0.5)" in text
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    start = next(number for number, line in enumerate(lines) if line.startswith("def multiple"))
    found = {"math": math}
    exec("\n".join(lines[start : start + 2]), found)
    rates = [found["multiple"](max(step - 1, 0)) for step in range(8)]
    assert rates == pytest.approx([0, 0, 0.5, math.log(3) / math.log(4), 1, 1, 0.875, 0.75])


# DeepSpeed's own, by its classes: 4 steps of warm-up of 12, the optimizer stepped before the schedule.
RATES = {
    ("WarmupLR", "log"): [0, 0, 0.5, 0.792481250, 1, 1, 1],
    ("WarmupDecayLR", "linear"): [0, 0, 0.25, 0.5, 0.75, 1, 0.875],
    ("WarmupCosineLR", "linear"): [0, 0, 0.25, 0.5, 0.75, 0.961943572, 0.853568035],
}


@pytest.mark.parametrize(("name", "kind"), RATES)
def test_schedules_have_deepspeeds_rates(tmp_path, name, kind):
    numbers = {"warmup_max_lr": 2e-4, "warmup_num_steps": 4, "warmup_type": kind}
    if name != "WarmupLR":
        numbers["total_num_steps"] = 12
    block = {"type": name, "params": numbers}
    translation = translated(tmp_path, "ds.json", document(scheduler=block), target="run", world_size=4)
    written = manifest_of(translation)["lr_schedule"]
    rate = multiplier_of(TABLES["lr_schedule"](**written), num_steps=12, folder=tmp_path)
    assert [rate(step) for step in range(7)] == pytest.approx(RATES[name, kind], abs=1e-8)
    verdicts = verdicts_of(translation)
    assert all(verdicts[f"scheduler.params.{key}"] == "carried" for key in numbers)
    assert verdicts["scheduler.type"] == "carried"


def test_a_warmup_from_above_0_is_derived(tmp_path):
    numbers = {"warmup_min_lr": 5e-5, "warmup_max_lr": 2e-4, "warmup_num_steps": 4, "warmup_type": "linear"}
    block = {"type": "WarmupDecayLR", "params": numbers | {"total_num_steps": 12}}
    translation = translated(tmp_path, "ds.json", document(scheduler=block), target="run", world_size=4)
    written = manifest_of(translation)["lr_schedule"]
    rate = multiplier_of(TABLES["lr_schedule"](**written), num_steps=12, folder=tmp_path)
    iterations = [0, *range(11)]
    expected = [0.25 + 0.75 * min(k / 4, 1 if k < 4 else (12 - k) / 8) for k in iterations]
    assert [rate(step) for step in range(12)] == pytest.approx(expected)
    assert verdicts_of(translation)["scheduler.params.warmup_min_lr"] == "derived"


@pytest.mark.parametrize(("kind", "more", "decay"), [("AdamW", {}, 0.01), ("Adam", {"adam_w_mode": False}, 0.0)])
def test_torchs_adam_decays_by_its_own_default(tmp_path, kind, more, decay):
    given = {"type": kind, "params": {"lr": 1e-3, "torch_adam": True} | more}
    translation = translated(tmp_path, "ds.json", document(optimizer=given), target="run", world_size=4)
    assert manifest_of(translation)["optimizer"]["weight_decay"] == decay


@pytest.mark.parametrize("target", ["compose", "run"])
def test_the_schedule_sets_the_rate_and_not_the_optimizer(tmp_path, target):
    block = {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 4}}
    given = {"type": "AdamW", "params": {"lr": 1e-3}}
    described = document(optimizer=given, scheduler=block)
    translation = translated(tmp_path, "ds.json", described, target=target, world_size=4)
    assert translation.settings["optimizer.lr"].value == 3e-4
    assert verdicts_of(translation)["optimizer.params.lr"] == "ignored-there"


@pytest.mark.parametrize(("target", "verdict"), [("run", "refused"), ("compose", "missing")])
def test_rates_that_a_schedule_of_deepspeeds_alone_sets_are_no_constant_of_a_run(tmp_path, target, verdict):
    described = document(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}})
    translation = translated(tmp_path, "ds.json", described, target=target, world_size=4)
    assert verdicts_of(translation)["scheduler.type"] == verdict


def test_the_first_step_of_a_cosine_has_no_rate(tmp_path):
    numbers = {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}
    described = document(scheduler={"type": "WarmupCosineLR", "params": numbers})
    run = translated(tmp_path, "ds.json", described, target="run", world_size=4)
    assert verdicts_of(run)["scheduler.params.warmup_min_ratio"] == "changed"
    loop = translated(tmp_path, "ds.json", described, target="compose", world_size=4).loop
    assert any(line.endswith("lambda step: multiple(step - 1) if step else 0.0)") for line in loop)


@pytest.mark.parametrize(
    ("stage", "state", "parameters", "expected"),
    [
        (2, "cpu", "cpu", {"fsdp2": {"zero": 2}, "cpu_offload": {"mode": "optimizer"}}),
        (3, "none", "cpu", {"fsdp2": {"zero": 3}, "cpu_offload": {"mode": "parameters"}}),
        (3, "nvme", "none", {"fsdp2": {"zero": 3}, "nvme_offload": {"folder": "/disk"}}),
        (0, "none", "none", {"ddp": {}}),
    ],
)
def test_offloading(tmp_path, stage, state, parameters, expected):
    block = {
        "stage": stage,
        "offload_optimizer": {"device": state, "nvme_path": "/disk"},
        "offload_param": {"device": parameters},
    }
    translation = translated(tmp_path, "ds.json", document(train_batch_size=8, zero_optimization=block))
    assert manifest_of(translation)["sharding"] == expected
    if stage < 3 and parameters == "cpu":
        assert verdicts_of(translation)["zero_optimization.offload_param.device"] == "ignored-there"


def test_old_blocks_are_true_or_false(tmp_path):
    for value, expected in ((True, {"fsdp2": {"zero": 1}}), (False, {"ddp": {}})):
        translation = translated(tmp_path, "ds.json", document(train_batch_size=8, zero_optimization=value))
        assert manifest_of(translation)["sharding"] == expected


def test_float16_has_deepspeeds_scale(tmp_path):
    translation = translated(tmp_path, "ds.json", document(train_batch_size=8, fp16={"enabled": True, "hysteresis": 2}))
    assert manifest_of(translation)["precision"]["mixed"] == {
        "param_dtype": "float16",
        "norms": "as_others",
        "reduce_dtype": "float16",
        "initial_scale": 65536.0,
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1.0,
    }
    assert verdicts_of(translation)["fp16.hysteresis"] == "carried"


def test_a_static_scale_of_deepspeeds_is_carried(tmp_path):
    content = document(train_batch_size=8, fp16={"enabled": True, "loss_scale": 128, "hysteresis": 4})
    translation = translated(tmp_path, "ds.json", content)
    assert manifest_of(translation)["precision"]["mixed"]["static_scale"] == 128.0
    assert verdicts_of(translation)["fp16.loss_scale"] == "carried"
    assert verdicts_of(translation)["fp16.hysteresis"] == "ignored-there"


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"micro": 2, "steps": 4}, {"world_size": 3}, {"microbatch": 2, "global_batch": 24}),
        ({"micro": 2}, {}, {"microbatch": 2}),
        ({"total": 48, "steps": 4}, {"world_size": 3}, {"microbatch": 4, "global_batch": 48}),
        ({"total": 48, "micro": 4}, {}, {"microbatch": 4, "global_batch": 48}),
    ],
)
def test_of_three_batch_sizes_the_missing_one_is_derived(tmp_path, sizes, options, expected):
    names = {
        "total": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
    }
    content = document(**{names[name]: value for name, value in sizes.items()})
    assert manifest_of(translated(tmp_path, "ds.json", content, **options))["train"] == expected


def test_accumulation_without_a_world_size_is_the_loops_or_carried(tmp_path):
    content = document(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4)
    of_a_loop = translated(tmp_path, "ds.json", content)
    assert any(line.startswith("with run.accumulate(4):") for line in of_a_loop.loop)
    of_a_run = translated(tmp_path, "ds.json", content, target="run")
    assert verdicts_of(of_a_run)["gradient_accumulation_steps"] == "carried"
    assert manifest_of(of_a_run)["train"] == {**manifest_of(of_a_run)["train"], "accumulate": 4, "microbatch": 2}


def test_clipping_has_the_default_of_the_version(tmp_path):
    for version, norm in ((None, 1.0), ("0.19.3", 1.0), ("0.16.4", math.inf)):
        translation = translated(tmp_path, "ds.json", document(train_batch_size=8), target="run", version=version)
        assert manifest_of(translation)["train"]["grad_clip"] == norm


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def test_what_a_trainer_fills_in_comes_from_its_arguments(tmp_path):
    arguments = {"learning_rate": 1e-4, "per_device_train_batch_size": 4, "bf16": True, "max_steps": 200}
    arguments |= {"warmup_ratio": 0.1, "adam_beta2": 0.95, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    translation = translated(tmp_path, "ds.json", document(**AUTO), target="run", world_size=4, arguments=arguments)
    manifest = manifest_of(translation)
    assert manifest["train"] == {"microbatch": 4, "global_batch": 32, "grad_clip": 0.3, "steps": 200}
    assert manifest["optimizer"]["lr"] == 1e-4 and manifest["optimizer"]["betas"] == [0.9, 0.95]
    assert manifest["lr_schedule"] == {
        "use": "constant",
        "warmup": 20,
        "warmup_start": 0.0,
        "warmup_shape": "log",
        "warmup_delay": 1,
    }
    assert manifest["precision"]["mixed"]["param_dtype"] == "bfloat16"
    assert "refused" not in verdicts_of(translation).values()


def test_without_its_arguments_it_is_refused_by_key(tmp_path):
    translation = translated(tmp_path, "ds.json", document(**AUTO), target="compose")
    refused = {key for key, verdict in verdicts_of(translation).items() if verdict == "refused"}
    assert {"train_batch_size", "gradient_clipping", "bf16.enabled", "optimizer.params.lr"} <= refused
    assert "zero_optimization.reduce_bucket_size" not in refused
    assert "--training-args" in translation.verdicts["optimizer.params.lr"].note


@pytest.mark.parametrize(
    ("content", "key", "verdict", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "refused", "is no ZeRO stage"),
        ({"gradient_clipping": "high"}, "gradient_clipping", "refused", "must be a number"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "refused", "another algorithm"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type", "missing", "Lion by name"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled", "refused", "DeepSpeed raises"),
        ({"msamp": {"enabled": True, "opt_level": "O2"}}, "msamp.opt_level", "refused", "8-bit weights"),
        ({"msamp": {"enabled": False, "opt_level": "O2"}}, "msamp.opt_level", "meaningless", "not enabled"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled", "refused", "grow"),
        ({"fp16": {"enabeld": True}}, "fp16.enabeld", "ignored-there", 'did you mean "enabled"'),
        ({"stage": 3}, "stage", "ignored-there", "DeepSpeed reads zero_optimization.stage"),
        ({"_comment": "text"}, "_comment", "ignored-there", "a comment"),
        (
            {"activation_checkpointing": {"profile": True}},
            "activation_checkpointing.profile",
            "ignored-there",
            "call it",
        ),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size", "carried", ""),
    ],
)
def test_verdicts_of_single_keys(tmp_path, content, key, verdict, said):
    translation = translated(tmp_path, "ds.json", document(**{"train_batch_size": 8, **content}))
    assert verdicts_of(translation)[key] == verdict
    assert said in translation.verdicts[key].note


def test_groups_that_keep_weights_are_checked_on_as_many_ranks(tmp_path):
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8, '
    (tmp_path / "ds.json").write_text(text + '"zero_quantized_weights": true}}')
    result = import_config(tmp_path / "ds.json", name=str(tmp_path / "run.toml"))
    assert result.ok, result.problems


def test_a_file_without_a_batch_size_is_reported_and_a_slip_is_named(tmp_path):
    translation = translated(tmp_path, "ds.json", document(train_micro_batch_size_per_gp=4, bf16={"enabled": True}))
    entry = translation.verdicts["train_micro_batch_size_per_gp"]
    assert entry.verdict == "refused" and 'did you mean "train_micro_batch_size_per_gpu"?' in entry.note
    (problem,) = translated(tmp_path, "ds.json", document(bf16={"enabled": True})).problems
    assert problem.severity == "warning" and "neither train_batch_size nor" in problem.message


def test_data_is_sought_beside_the_manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "corpus").mkdir(parents=True)
    (tmp_path / "there" / "corpus" / "a.txt").write_text("some text to train on\n" * 200)
    (tmp_path / "ds.json").write_text(document(train_micro_batch_size_per_gpu=1))
    for name, is_found in (("there/run.toml", True), ("run.toml", False)):
        result = import_config("ds.json", target="run", data="corpus/", name=name)
        assert any(problem.table == "data" and "corpus" in problem.message for problem in result.problems) != is_found
        assert 'use = "corpus/"' in result.manifest
