"""The loop's own lines of an imported file: a loop of them trains as `composer3d run` does by the same import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli
import torch
from pydantic import TypeAdapter
from support.imported import manifest_of, translated
from support.imported_optimizers import SOURCES, megatron
from support.models import composed, seeded, sum_loss, unpadded

from composer3d.importing.commented_manifest import write_manifest
from composer3d.manifest import search
from composer3d.runner import BatchSize, LRSchedule, TrainTable, multiplier_of
from composer3d.runner.objective.lr_schedule_table import LRScheduleTable
from composer3d.runner.objective.optimizer_groups import describe_groups, optimizer_class
from composer3d.runner.runner_tables import OptimizerTable

pytest.importorskip("yaml")

STEPS = 4
FALLING = ("--weight-decay", "0.5", "--global-batch-size", "8", "--lr-decay-style")
AXOLOTL = "base_model: x\nmicro_batch_size: 1\nmax_steps: 9\nlearning_rate: 0.01\nweight_decay: 0.5\n"
LOOPS = {
    **{name: SOURCES[name] for name in ("deepspeed-l2", "deepspeed-sgd", "megatron-adam", "megatron-sgd", "neox-sgd")},
    **{name: SOURCES[name] for name in ("automodel-AdamW", "automodel-SGD", "torchtitan-AdamW", "torchtitan-Adam")},
    **{f"megatron-{style}": megatron("adam", *FALLING, style, "--lr-warmup-iters", "2") for style in ("cosine", "WSD")},
    "megatron-samples": megatron("adam", *FALLING, "inverse-square-root", "--rampup-batch-size", "4", "4", "12"),
    "neox-cosine": ("neox.yml", '"num_layers": 2\n"train_iters": 9\n"warmup": 0.3\n"lr_decay_style": "cosine"\n'),
    "axolotl-cosine": ("axolotl.yml", f"{AXOLOTL}cosine_min_lr_ratio: 0.2\nwarmup_steps: 3\n"),
    "axolotl-default": ("axolotl.yml", f"{AXOLOTL}optimizer: sgd\nlr_scheduler: linear\n"),
    "automodel-warmup": (
        "recipe.yaml",
        f"{SOURCES['automodel-AdamW'][1]}lr_scheduler: {{lr_decay_style: cosine, lr_warmup_steps: 2}}\n",
    ),
}


def lines_of(text: str) -> list[str]:
    """Return the code that a manifest for a loop has in its comments."""
    lines = text.partition("# The loop's own lines:\n")[2].partition("# In a manifest of")[0].splitlines()
    return [line.removeprefix("#").strip() for line in lines]


def trained_by_lines(lines: list[str], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights after some steps of a loop that has the lines."""
    run = composed("", seeded())
    names = {"run": run, "torch": torch}
    clip = [line for line in lines if line.startswith("run.clip")]
    exec("\n".join(line for line in lines if line not in clip), names)
    for step in range(STEPS):
        with run.step(step):
            run.forward_backward(x, target=y)
            exec("\n".join(clip), names)
            names["optimizer"].step()
            names["optimizer"].zero_grad()
            if "schedule" in names:
                names["schedule"].step()
    weights = {name: parameter.detach().clone() for name, parameter in run.named_parameters()}
    run.close()
    return weights


def typed(table: type, values: dict) -> object:
    return TypeAdapter(table).validate_json(json.dumps(values))


def trained_by_tables(manifest: dict, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same of one device with plain torch, whose optimizer and rates are those of a run's tables."""
    model, train = seeded(), manifest["train"]
    table = typed(OptimizerTable, manifest["optimizer"])
    cls, defaults = optimizer_class(table, Path())
    described = describe_groups(table, {name: p.ndim for name, p in model.named_parameters()}, defaults)
    members = [{**group, "params": []} for group in described] + [{"params": []}]
    for name, parameter in model.named_parameters():
        of = next((n for n, group in enumerate(described) if search(group["match"], name)), -1)
        members[of]["params"].append(parameter)
    optimizer = cls([{k: v for k, v in group.items() if k != "match"} for group in members], **defaults)
    keys = ("steps", "global_batch", "batch_ramp", "microbatch")
    sizes = BatchSize(typed(TrainTable, {key: train[key] for key in keys if key in train}), degree=1)
    rates = typed(LRScheduleTable, manifest["lr_schedule"])
    schedule = LRSchedule(optimizer, multiplier_of(rates, num_steps=train["steps"], folder=Path(), sizes=sizes))
    for step in range(STEPS):
        schedule.apply(step)
        loss, count = sum_loss(model(x), y)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.fixture
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("source", LOOPS)
def test_a_loop_of_the_lines_trains_as_the_run_does(tmp_path: Path, source: str, in_float64: None) -> None:
    name, text = LOOPS[source]
    system = source.partition("-")[0]
    loop = write_manifest(translated(tmp_path, name, text, system=system, target="compose"))
    assert tomli.loads(loop)["composer3d"] == 1
    manifest = manifest_of(translated(tmp_path, name, text, system=system, target="run"))
    manifest["train"] |= {"steps": 9} if not isinstance(manifest["train"].get("steps"), int) else {}
    lines = [line.replace("num_steps=steps", "num_steps=9") for line in lines_of(loop)]
    x, y = unpadded()
    found, wanted = trained_by_lines(lines, x, y), trained_by_tables(manifest, x, y)
    first = dict(seeded().named_parameters())
    for fqn, weight in wanted.items():
        moved = (weight - first[fqn]).abs().max()
        assert moved > 0
        assert (found[fqn] - weight).abs().max() <= 1e-12 * moved, fqn
