"""Arguments of transformers' Trainer, and its file of FSDP's options, as manifests."""

from __future__ import annotations

import json

import pytest
import torch
from support.imported import manifest_of, translated, verdicts_of
from transformers import TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import LabelSmoother

from composer3d.importing.recognition import recognise
from composer3d.runner import TABLES
from composer3d.runner.objective.loss_functions import make_loss
from composer3d.runner.objective.loss_table import LossTable
from composer3d.runner.objective.lr_schedule import multiplier_of

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
        "lr_schedule": {"use": "cosine", "warmup": 30, "warmup_start": 0.0, "min_ratio": 0.0},
        "checkpoint": {"every": 500, "keep": 2},
        "sharding": {
            "fsdp2": {"zero": 3, "forward_prefetch": 1, "unit_classes": ["Block"]},
            "cpu_offload": {"mode": "all"},
        },
        "scheduling": {"activation_checkpoint": {"mode": "full"}},
        "precision": {"mixed": {"param_dtype": "bfloat16", "output_dtype": "float32", "reduce_dtype": "bfloat16"}},
        "profiling": {"tensorboard": {}},
    }
    verdicts = verdicts_of(translation)
    assert verdicts["lr_scheduler_type"] == "carried" and verdicts["lerning_rate"] == "ignored-there"
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
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor", "carried"),
        ({"label_smoothing_factor": 0.0}, "label_smoothing_factor", "equal"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type", "refused"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1.5}}, "lr_scheduler_type", "refused"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "load_best_model_at_end", "changed"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "f1"}, "metric_for_best_model", "missing"),
        ({"num_train_epochs": 3}, "num_train_epochs", "missing"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "carried"),
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
        "sharding": {"fsdp2": {"zero": 3, "unit_classes": ["Block"]}},
        "scheduling": {"activation_checkpoint": {"mode": "full"}},
    }
    assert verdicts_of(translated(tmp_path, "xla.json", '{"xla": "true"}', system="fsdp"))["xla"] == "refused"


SCHEDULES = {
    "linear": {},
    "cosine": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 3.0, "lr_end": 1e-5},
    "inverse_sqrt": {"timescale": 30},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "cosine_warmup_with_min_lr ": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1},
    "warmup_stable_decay ": {"num_decay_steps": 6, "warmup_type": "cosine", "decay_type": "1-sqrt"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(tmp_path, name):
    given = {"lr_scheduler_type": name.strip(), "lr_scheduler_kwargs": SCHEDULES[name], "max_steps": 20}
    stated = ARGUMENTS | given | {"warmup_steps": 0.19}  # of 20 steps 4, rounded up
    translation = translated(tmp_path, "args.json", json.dumps(stated), world_size=8)
    written = manifest_of(translation)["lr_schedule"]
    rate = multiplier_of(TABLES["lr_schedule"](**written), num_steps=20, folder=tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=stated["learning_rate"])
    theirs = get_scheduler(name.strip(), optimizer, 4, 20, scheduler_specific_kwargs=SCHEDULES[name])
    for step in range(20):
        assert rate(step) * 1e-4 == pytest.approx(theirs.get_last_lr()[0], abs=1e-18)
        optimizer.step()
        theirs.step()
    told = verdicts_of(translation)
    assert told["lr_scheduler_type"] == "carried"
    assert all(told[f"lr_scheduler_kwargs.{key}"] == "derived" for key in SCHEDULES[name])


def test_a_fraction_of_a_run_of_unknown_length_is_told(tmp_path):
    stated = {key: value for key, value in ARGUMENTS.items() if key != "max_steps"} | {"warmup_steps": 0.1}
    translation = translated(tmp_path, "args.json", json.dumps(stated), world_size=8)
    assert verdicts_of(translation)["warmup_steps"] == "changed"
    assert manifest_of(translation)["lr_schedule"]["warmup"] == 0.1


def test_smoothed_labels_are_those_of_the_trainer(tmp_path):
    stated = ARGUMENTS | {"label_smoothing_factor": 0.2}
    written = manifest_of(translated(tmp_path, "args.json", json.dumps(stated), world_size=8))["train"]["loss"]
    function = make_loss(LossTable(**written), tmp_path).function
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 11, dtype=torch.float64), torch.randint(11, (2, 5))
    labels[0, 2:] = -100
    ours = function(logits, labels)
    theirs = LabelSmoother(epsilon=0.2)({"logits": logits}, labels, num_items_in_batch=7)
    assert int(ours.count) == 7
    # The Trainer sums what is spread over the classes in float32.
    assert float(ours.sum / ours.count) == pytest.approx(float(theirs), rel=1e-6)
    assert float(ours.sum / ours.count) == pytest.approx(_smoothed(logits, labels, 0.2), rel=1e-13)


def _smoothed(logits, labels, share):
    """Return the mean over labels of the cross entropy with a target that is spread over the classes."""
    logs = torch.log_softmax(logits, -1).flatten(0, 1)
    each = [
        -((1 - share) * row[label] + share * row.mean())
        for row, label in zip(logs, labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    return float(sum(each) / len(each))


def test_a_share_above_1_is_a_problem_and_a_loop_smooths_by_itself(tmp_path):
    stated = json.dumps(ARGUMENTS | {"label_smoothing_factor": 1.5})
    problems = translated(tmp_path, "args.json", stated, world_size=8).problems
    assert any(
        "label_smoothing_factor" in str(one) and "must be at least 0 and below 1" in str(one) for one in problems
    )
    stated = json.dumps(ARGUMENTS | {"label_smoothing_factor": 0.1})
    translation = translated(tmp_path, "args.json", stated, target="compose")
    assert any("label_smoothing=0.1" in line for line in translation.loop)
    assert verdicts_of(translation)["label_smoothing_factor"] == "carried"


def test_activation_checkpointing_is_carried_by_its_new_name_and_the_old_one_is_not_read(tmp_path):
    new = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 3, "offload": True}}
    arguments = {**ARGUMENTS, **new, "gradient_checkpointing": False}
    translation = translated(tmp_path, "args.json", json.dumps(arguments), world_size=8)
    scheduling = manifest_of(translation)["scheduling"]
    assert scheduling == {"activation_checkpoint": {"mode": "full", "every": 3}, "activation_offload": {}}
    found = verdicts_of(translation)
    assert found["activation_checkpointing"] == found["activation_checkpointing_kwargs.every_n_layers"] == "carried"
    assert found["gradient_checkpointing"] == "ignored-there"


@pytest.mark.parametrize("pair", [("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")])
def test_two_16_bit_formats_are_refused_as_the_trainer_refuses_them(tmp_path, pair):
    stated = ARGUMENTS | {"bf16": False} | dict.fromkeys(pair, True)
    (problem,) = [p for p in translated(tmp_path, "args.json", json.dumps(stated)).problems if p.severity == "error"]
    assert problem.key == pair[1] and f"cannot stand beside {pair[0]} = true" in problem.message
    with pytest.raises(ValueError, match="At most one of fp16 and bf16"):
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **dict.fromkeys(pair, True))


@pytest.mark.parametrize(
    ("keys", "compiled"),
    [
        ("torch_compile: true", {"backend": "inductor", "fullgraph": False}),
        (
            "torch_compile_mode: reduce-overhead",
            {"backend": "inductor", "fullgraph": False, "mode": "reduce-overhead"},
        ),
        ("torch_compile_backend: aot_eager", {"backend": "aot_eager", "fullgraph": False}),
        ("torch_compile: false", None),
    ],
)
def test_a_backend_or_a_mode_switches_compilation_on(tmp_path, keys, compiled):
    translation = translated(tmp_path, "args.yaml", f"{keys}\nlearning_rate: 1e-3\n", system="trainer", target="run")
    assert manifest_of(translation).get("scheduling", {}).get("compile") == compiled
    assert "missing" not in {verdicts_of(translation)[key] for key in verdicts_of(translation) if "compile" in key}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("paged_adamw_32bit", "carried"), ("paged_adamw_8bit", "changed"), ("paged_lion_8bit", "refused")],
)
def test_paged_optimizers(tmp_path, name, verdict):
    translation = translated(tmp_path, "args.yaml", f"optim: {name}\nmax_steps: 3\n", system="trainer", target="run")
    assert verdicts_of(translation)["optim"] == verdict and manifest_of(translation)["optimizer"]["use"] == "adamw"
