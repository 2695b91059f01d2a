"""Lines of a loop that has the optimizer, the schedule and the clipping of an imported file.

They are what `composer3d run` does with the same keys: the numbers of both are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer3d.importing.translation import Setting

__all__ = ["loop_lines"]

_CLASSES = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD", "muon": "Muon"}
_KEYS = ("groups", "args", "no_decay")  # of [optimizer], and no arguments of the class
# Names and dims of the whole model: a stage has as many groups as the others.
_SPARED = (
    "import re",
    "spared = [name for name, form in run.context.parameter_forms.items() if form.ndim < 2]  # norms and biases",
    'groups = [{"match": f"^(?:{\'|\'.join(map(re.escape, spared))})$", "weight_decay": 0.0}] if spared else []',
)


def loop_lines(own: Mapping[str, Setting], written: Sequence[str]) -> list[str]:
    """Return the code of the optimizer, of the schedule unless a source's rules wrote one, and of the clipping.

    Args:
        own: Settings that a loop has itself, by their keys in a manifest of a run.
        written: Lines that the rules of the source wrote; they stand behind these.
    """
    lines = _optimizer(own)
    if not any(line.startswith("schedule = ") for line in written):
        lines += _schedule(own)
    clip = own.get("train.grad_clip")
    if clip is not None and clip.value != float("inf"):
        lines.append(f"run.clip_grad_norm_({clip.value})  # {clip.reason}")
    if any("math." in line for line in written):
        lines.append("import math")
    return [*lines, *written]


def _optimizer(own: Mapping[str, Setting]) -> list[str]:
    given = _below(own, "optimizer")
    if not given:
        return []
    name, groups = str(given.pop("use", "adamw")), given.get("groups")
    options = {key: value for key, value in given.items() if key not in _KEYS} | given.get("args", {})
    lines: list[str] = []
    if groups is None and options.get("weight_decay"):
        lines += _SPARED
    elif groups is not None and _says_more(groups, options.get("weight_decay")):
        lines.append(f"groups = {_shown(groups)}")
    if name == "muon":
        named = "groups" if lines else "[]"
        lines.append("from composer3d.runner import Muon, group_matrices, matrices_of")
        lines.append(f"groups = group_matrices({named}, matrices_of(run, None))  # the matrices in blocks")
    arguments = [_CLASSES.get(name, name.replace(":", ".")), *(["groups=groups"] if lines else []), _named(options)]
    return [*lines, f"optimizer = run.optimizer({', '.join(filter(None, arguments))})"]


def _says_more(groups: Sequence[Mapping[str, Any]], decay: Any) -> bool:
    """Return whether groups say anything else than that every parameter decays as the optimizer is told."""
    return any(dict(group) != {"match": ".", "weight_decay": decay} for group in groups)


def _schedule(own: Mapping[str, Setting]) -> list[str]:
    """Return the code of the rates, as a function of the step and one of torch's schedulers."""
    given = _below(own, "lr_schedule")
    if not given or (given.get("use") == "constant" and not given.get("warmup")):
        return []
    steps = own["train.steps"].value if "train.steps" in own else "steps"
    names, sizes, before = ["LRScheduleTable", "multiplier_of"], "", []
    if "unit" in given:
        names, sizes = ["BatchRampTable", "BatchSize", *names, "TrainTable"], ", sizes=sizes"
        of_train = f"steps={steps}, global_batch={own['train.global_batch'].value}"
        if "train.batch_ramp" in own:
            of_train += f", batch_ramp=BatchRampTable({_named(own['train.batch_ramp'].value)})"
        before = [f"sizes = BatchSize(TrainTable({of_train}), degree=1)"]
    return [
        "from pathlib import Path",
        f"from composer3d.runner import {', '.join(names)}",
        *before,
        f"rates = LRScheduleTable({_named(given)})",
        f"multiple = multiplier_of(rates, num_steps={steps}, folder=Path(){sizes})",
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, multiple)  # schedule.step() behind optimizer.step()",
    ]


def _below(own: Mapping[str, Setting], table: str) -> dict[str, Any]:
    prefix = f"{table}."
    return {path.removeprefix(prefix): item.value for path, item in own.items() if path.startswith(prefix)}


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_shown(value)}" for key, value in values.items())


def _shown(value: Any) -> str:
    """Return a value as Python writes it; pairs as torch's classes have them."""
    is_pair = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    return repr(tuple(value) if is_pair else value)
