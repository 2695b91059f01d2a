"""Learning-rate schedules of a DeepSpeed file, each with its formula.

A schedule there is stepped behind the optimizer, so step s, from 0, has the rate of its iteration k = s - 1, and the
first two have the lowest; WarmupCosineLR's first has none at all. Source: deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

from typing import Any

from composer3d.importing.automatic import argument, resolve
from composer3d.importing.translation import Translation

__all__ = ["schedule"]

_TYPE, _PARAMS = "scheduler.type", "scheduler.params"
_NAMES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def schedule(translation: Translation) -> None:
    """Carry the schedule: into lines of a loop, or into a manifest of a run."""
    t = translation
    if not t.has_block("scheduler"):
        if t.has_block("optimizer"):
            t.put("lr_schedule.use", "constant", reason="DeepSpeed's default: no schedule")
        return
    name = t.text(_TYPE)
    if name not in _NAMES:
        if name in ("LRRangeTest", "OneCycle"):
            note = f"DeepSpeed's {name} sets the rate in every step; no schedule of a manifest does as it does"
            t.judge(_TYPE, "refused" if t.is_run else "missing", note)
        note = f"of {name}" if name in ("LRRangeTest", "OneCycle") else "no schedule of DeepSpeed"
        t.judge_block("scheduler", "missing", note)
        return
    numbers = _numbers(t, name)
    if numbers is None:
        t.judge_block("scheduler", "missing", "the schedule is not known without its numbers")
        return
    if t.is_run:
        _in_a_run(t, name, numbers)
    else:
        _in_a_loop(t, name, numbers)


def _numbers(t: Translation, name: str) -> dict[str, Any] | None:
    """Return the schedule's numbers; None where the trainer fills in one and its arguments are not given."""
    arguments = t.options.arguments or {}
    steps = int(argument(arguments, "max_steps"))
    warmup = argument(arguments, "warmup_steps") or float(argument(arguments, "warmup_ratio")) * max(steps, 0)
    warmup = round(warmup * max(steps, 0)) if 0 < warmup < 1 else int(warmup)
    rate = float(argument(arguments, "learning_rate"))
    filled = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": warmup, "total_num_steps": steps}
    defaults: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_num_steps": 1000, "warmup_type": "log"}
    if name == "WarmupCosineLR":
        defaults |= {"warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4}
    found = dict(defaults)
    for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type"):
        full = f"{_PARAMS}.{key}"
        if full in t:
            value = resolve(t, full, value=filled.get(key))
            if value is None:
                return None
            found[key] = value if key == "warmup_type" or t.get(full) == "auto" else t.number(full)
    for key in ("warmup_min_ratio", "cos_min_ratio"):
        if name == "WarmupCosineLR":
            found[key] = t.number(f"{_PARAMS}.{key}", defaults[key])
    return None if any(value is None for value in found.values()) else found


def _warmup(numbers: dict[str, Any]) -> str:
    length = max(2, int(numbers["warmup_num_steps"]))
    if numbers["warmup_type"] == "linear":
        return f"k / {length}"
    return f"math.log(k + 1) / math.log({length})"


def _formula(name: str, numbers: dict[str, Any]) -> str:
    """Return the multiple of the highest rate at iteration k as a Python expression."""
    length, total = max(2, int(numbers["warmup_num_steps"])), numbers.get("total_num_steps")
    rising = _warmup(numbers)
    if name == "WarmupLR":
        after = "1.0"
    elif name == "WarmupDecayLR":
        after = f"max(0.0, ({int(total or 0)} - k) / max(1, {int(total or 0)} - {length}))"
    else:
        lowest = numbers["cos_min_ratio"]
        done = f"min(1.0, (k - {length} + 1) / max(1, {int(total or 0)} - {length}))"
        after = f"{lowest} + {1 - lowest} * 0.5 * (1 + math.cos(math.pi * {done}))"
    first = numbers.get("warmup_min_ratio", 0.0) if name == "WarmupCosineLR" else _lowest(numbers)
    if first:
        rising = f"{first:.6g} + {1 - first:.6g} * {rising}"
        if name == "WarmupDecayLR":
            after = f"{first:.6g} + {1 - first:.6g} * {after}"
    return f"{rising} if k < {length} else {after}"


def _lowest(numbers: dict[str, Any]) -> float:
    highest = numbers.get("warmup_max_lr")
    return float(numbers["warmup_min_lr"]) / float(highest) if highest else 0.0


def _in_a_loop(t: Translation, name: str, numbers: dict[str, Any]) -> None:
    t.loop.append(f"def multiple(k):  # {name}, as DeepSpeed computes it")
    t.loop.append(f"    return {_formula(name, numbers)}")
    of_step = "multiple(max(step - 1, 0))"
    if name == "WarmupCosineLR" and numbers["warmup_min_ratio"]:
        of_step = "multiple(step - 1) if step else 0.0"
    t.loop.append(f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {of_step})")
    if "optimizer.lr" in t.settings:
        _set_rate(t, numbers)
    elif "warmup_max_lr" in numbers:
        t.loop.append(f"# The highest rate is warmup_max_lr = {numbers['warmup_max_lr']}.")
    t.judge_block("scheduler", "carried", "the loop's own: multiple(k) in the manifest's comments is this schedule")


def _in_a_run(t: Translation, name: str, numbers: dict[str, Any]) -> None:
    """Write the schedule: its warm-up is a step behind, the fall of WarmupDecayLR too, that of WarmupCosineLR not."""
    length, total = max(2, int(numbers["warmup_num_steps"])), int(numbers.get("total_num_steps") or 0)
    kind = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}[name]
    is_cosine = kind == "cosine"
    first = float(numbers["warmup_min_ratio"]) if is_cosine else _lowest(numbers)
    keys = {
        "use": (kind, _TYPE),
        "warmup": (length, f"{_PARAMS}.warmup_num_steps"),
        "warmup_start": (first, f"{_PARAMS}.{'warmup_min_ratio' if is_cosine else 'warmup_min_lr'}"),
        "warmup_shape": ("linear" if numbers["warmup_type"] == "linear" else "log", f"{_PARAMS}.warmup_type"),
    }
    for key, (value, source) in keys.items():
        t.put(f"lr_schedule.{key}", value, source, reason=None if source in t else "DeepSpeed's default")
        verdict, note = "derived" if key == "warmup_start" else "carried", ""
        if key == "warmup_start" and is_cosine and first:
            verdict, note = "changed", f"DeepSpeed's first step has the rate 0, here {first:g} of the highest"
        t.judge(source, verdict, note, to=f"lr_schedule.{key}")
    t.put("lr_schedule.warmup_delay", 1, reason="the schedule is stepped behind the optimizer there")
    if kind != "constant":
        source = f"{_PARAMS}.cos_min_ratio"
        t.put("lr_schedule.min_ratio", float(numbers["cos_min_ratio"]) if is_cosine else first, source)
        t.judge(source, "carried", to="lr_schedule.min_ratio")
    if total > 0 and kind != "constant":
        t.put("train.steps", total, f"{_PARAMS}.total_num_steps")
        t.judge(f"{_PARAMS}.total_num_steps", "carried", "the schedule ends with the run", to="train.steps")
        if not is_cosine:
            t.put("lr_schedule.decay", max(total - length, 1), reason="total_num_steps - warmup_num_steps")
            t.put("lr_schedule.decay_end", total + 1, reason="a step behind")
    _set_rate(t, numbers)
    begun = f"{_PARAMS}.last_batch_iteration"
    t.judge(begun, "equal" if t.get(begun) == -1 else "changed", "a schedule that has begun before its first step")
    t.judge_block(_PARAMS, "ignored-there", "not of this schedule")


def _set_rate(t: Translation, numbers: dict[str, Any]) -> None:
    """Write the highest rate, which the schedule sets whatever the optimizer was given."""
    source, own = f"{_PARAMS}.warmup_max_lr", "optimizer.params.lr"
    if (highest := numbers.get("warmup_max_lr")) is None:
        return
    if own in t and (written := t.settings.get("optimizer.lr")) and written.value != float(highest):
        t.verdicts.pop(own, None)
        t.judge(own, "ignored-there", f"the schedule sets the rate, up to warmup_max_lr = {highest}")
    t.put("optimizer.lr", float(highest), source)
    t.judge(source, "carried", "the schedule sets the rate", to="optimizer.lr")
