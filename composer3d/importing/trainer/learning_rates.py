"""Learning-rate schedules of the Trainer, whose warm-up begins at 0. Source: transformers/optimization.py."""

from __future__ import annotations

import json
import math
from typing import Any

from composer3d.importing.translation import Translation

__all__ = ["schedule"]

_KEY, _ARGUMENTS = "lr_scheduler_type", "lr_scheduler_kwargs"
_SHAPES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}


def schedule(translation: Translation) -> None:
    """Carry the schedule: by its own function in a loop, by the keys of its formula in a run."""
    t = translation
    name = t.text(_KEY, str(t.table.defaults[_KEY]))
    ratio = "warmup_ratio" if t.number("warmup_steps", 0) in (0, None) and "warmup_ratio" in t else "warmup_steps"
    length = _warmup(t, ratio)
    lowest = [f"{_ARGUMENTS}.{one}" for one in ("min_lr", "min_lr_rate")]
    if "with_min_lr" in name and not any(key in t for key in lowest):
        hint = f"state min_lr or min_lr_rate in {_ARGUMENTS}"
        if _KEY in t:
            t.wrong(_KEY, "says no lowest rate, without which the Trainer raises", hint=hint)
    formula = _formula(t, name, length)
    if not t.is_run and (formula is None or t.table.name != "axolotl"):  # which has shapes of its own
        _in_a_loop(t, name, length)
    if formula is None:
        if t.is_run:
            note = f'{name} has no counterpart with these arguments; write lr_schedule.use = "module:callable"'
            t.judge(_KEY, "refused", note)
            t.judge_block(_ARGUMENTS, "missing" if _KEY in t else "refused", f"an argument of {name}")
    else:
        _put(t, name, ratio, formula)
    for one in ("warmup_steps", "warmup_ratio"):
        t.judge(one, "ignored-there", "this schedule has no warm-up" if name == "constant" else "the other one decides")
    t.judge_block(_ARGUMENTS, "missing", "no argument of this schedule, or one that is not known here")


def _in_a_loop(t: Translation, name: str, warmup: int | float) -> None:
    """Write the line of the Trainer's own function, with its arguments; a fraction of the steps is rounded up."""
    arguments = t.tree.values().get(_ARGUMENTS)
    steps = t.integer("max_steps", -1) or -1
    count = warmup if isinstance(warmup, int) else f"math.ceil({warmup} * steps)"
    given = f"num_warmup_steps={count}, num_training_steps={steps if steps > 0 else 'steps'}"
    if isinstance(arguments, dict) and arguments:
        given += f", scheduler_specific_kwargs={arguments!r}"
    t.loop.append(f"schedule = transformers.get_scheduler({json.dumps(name)}, optimizer, {given})")
    for one in (_KEY, "warmup_steps", "warmup_ratio"):
        t.judge(one, "carried", "the loop's own: transformers.get_scheduler")
    t.judge_block(_ARGUMENTS, "carried", "the loop's own: transformers.get_scheduler")


def _put(t: Translation, name: str, ratio: str, formula: dict[str, Any]) -> None:
    """Write the keys of a formula; those that depend on arguments name them."""
    warmup = formula["warmup"]
    t.put("lr_schedule.use", formula.pop("use"), _KEY, reason=None if _KEY in t else f"{t.table.title}'s default")
    t.put("lr_schedule.warmup", formula.pop("warmup"), ratio, reason=None if ratio in t else "the Trainer's default")
    for key, value in formula.items():
        if f"lr_schedule.{key}" not in t.settings:
            t.put(f"lr_schedule.{key}", value, reason=f"the Trainer's {name}")
    t.judge(_KEY, "carried", to="lr_schedule.use")
    if name != "constant":
        is_rounded = isinstance(warmup, float) and t.table.name != "axolotl"  # which rounds down too
        note = "a fraction is rounded up to a step there, down here" if is_rounded else ""
        t.judge(ratio, "changed" if note else "carried", note, to="lr_schedule.warmup")
    for argument in _TAKEN.get(name, ()):
        t.judge(f"{_ARGUMENTS}.{argument}", "derived", "of the formula", to="lr_schedule.use")


def _warmup(t: Translation, ratio: str) -> int | float:
    """Return the steps of warm-up; a fraction where the length of the run is not known."""
    steps, stated = t.integer("max_steps", -1) or -1, t.number(ratio)
    if t.table.name != "axolotl":
        stated = stated or 0
        if stated >= 1 or stated == 0:
            return int(stated)
        return math.ceil(steps * stated) if steps > 0 else float(stated)
    if stated is not None and (stated >= 1 or stated == 0):
        count: int | float = int(stated)
    elif steps > 0:
        count = int(stated * steps) if stated is not None else min(int(0.03 * steps), 100)
    else:
        return 0.03 if stated is None else float(stated)
    return 2 if count == 1 else count


# Which arguments a formula below takes in.
_MIN = ("min_lr", "min_lr_rate", "num_cycles")
_TAKEN: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": _MIN,
    "cosine_warmup_with_min_lr": (*_MIN, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}


def _formula(t: Translation, name: str, warmup: int | float) -> dict[str, Any] | None:
    """Return the keys of `[lr_schedule]` that are this schedule; None where there are none."""
    cycles = t.number(f"{_ARGUMENTS}.num_cycles", 1 if name == "cosine_with_restarts" else 0.5)
    if name == "cosine_with_restarts" and (cycles != int(cycles or 0) or not cycles or cycles < 1):
        return None
    if name != "cosine_with_restarts" and "num_cycles" in _TAKEN.get(name, ()) and cycles != 0.5:
        return None  # whole waves, which rise again
    if name == "constant":
        return {"use": "constant", "warmup": 0}
    start: dict[str, Any] = {"warmup": warmup} | ({"warmup_start": 0.0} if warmup else {})
    if name == "constant_with_warmup":
        return {"use": "constant", **start}
    if name in ("linear", "cosine"):
        return {"use": name, **start, "min_ratio": 0.0}
    if name == "cosine_with_restarts":
        return {"use": "cosine", **start, "cycles": int(cycles or 1), "min_ratio": 0.0}
    if name == "cosine_with_min_lr":
        return {"use": "cosine", **start, "min_ratio": _floor(t)}
    if name == "polynomial":
        lowest, rate = t.number(f"{_ARGUMENTS}.lr_end", 1e-7), t.number("learning_rate", 5e-5)
        power = t.number(f"{_ARGUMENTS}.power", 1.0)
        if not rate or lowest is None or lowest > rate or not power:
            return None
        return {"use": "polynomial", **start, "power": float(power), "min_ratio": lowest / rate}
    if name == "inverse_sqrt":
        scale = t.integer(f"{_ARGUMENTS}.timescale", least=1)
        return {"use": "inverse_sqrt", **start} | ({} if scale is None else {"timescale": scale})
    if name == "cosine_warmup_with_min_lr":
        return _early_cosine(t, warmup)
    return _stable(t, start) if name == "warmup_stable_decay" else None


def _early_cosine(t: Translation, warmup: int | float) -> dict[str, Any] | None:
    """Return the cosine whose warm-up reaches the rate in its last step, from where it falls."""
    steps = t.integer("max_steps", -1) or -1
    if isinstance(warmup, float) or warmup < 1 or steps <= warmup:
        return None
    first = t.number(f"{_ARGUMENTS}.warmup_lr_rate", 1 / warmup)
    rising = {} if warmup == 1 or first is None else {"warmup_start": float(first)}
    if warmup == 1 and f"{_ARGUMENTS}.warmup_lr_rate" in t:
        return None
    return {"use": "cosine", "warmup": warmup - 1, **rising, "decay_end": steps - 1, "min_ratio": _floor(t)}


def _stable(t: Translation, start: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schedule that stays at the rate before it falls."""
    decay = t.integer(f"{_ARGUMENTS}.num_decay_steps", least=1)
    stable = t.integer(f"{_ARGUMENTS}.num_stable_steps", least=0)
    rise = _SHAPES.get(t.text(f"{_ARGUMENTS}.warmup_type", "linear"))
    fall = _SHAPES.get(t.text(f"{_ARGUMENTS}.decay_type", "cosine"))
    if decay is None or rise is None or fall is None or (stable is not None and isinstance(start["warmup"], float)):
        return None
    lowest = float(t.number(f"{_ARGUMENTS}.min_lr_ratio", 0.0) or 0.0)
    keys = {"use": fall, **start, "decay": decay, "min_ratio": lowest}
    if start["warmup"]:
        keys |= {"warmup_shape": rise, "warmup_start": lowest}
    return keys if stable is None else keys | {"decay_end": start["warmup"] + stable + decay}


def _floor(t: Translation) -> float:
    rate = t.number(f"{_ARGUMENTS}.min_lr_rate")
    lowest, highest = t.number(f"{_ARGUMENTS}.min_lr"), t.number("learning_rate", 5e-5)
    if rate is None and lowest is not None and highest:
        rate = lowest / highest
    return float(min(max(rate or 0.0, 0.0), 1.0))
