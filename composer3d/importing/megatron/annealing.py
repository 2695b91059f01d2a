"""The rate's schedule of a Megatron-LM run. Source: megatron/core/optimizer_param_scheduler.py."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["annealed", "schedule"]

_TITLE = "Megatron-LM's default"
_STYLES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "inverse-square-root": "inverse_sqrt"}
_OF_SAMPLES = ("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")
_ANNEALED = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "minus_sqrt": "sqrt"}


def annealed(style: str) -> str | None:
    """Return what falls by an annealing of Megatron-LM's WSD; None where there is none.

    Args:
        style: Of `lr-wsd-decay-style`.
    """
    return _ANNEALED.get(style.lower())


def _counts_samples(t: Translation, each: int) -> bool:
    """Return whether the schedule follows samples: of a run by samples, unless all numbers are those of whole steps."""
    total = t.integer("train_samples") or 0
    counts = [t.integer(key) or 0 for key in _OF_SAMPLES]
    is_uneven = "train.batch_ramp" in t.settings or any(count % each for count in (total, *counts))
    return bool(total) and not t.integer("train_iters") and is_uneven


def _default(t: Translation, key: str) -> str | None:
    return None if key in t else _TITLE


def schedule(translation: Translation) -> None:
    """Carry the schedule: warm-up from `lr-warmup-init`, the fall, and the iteration in which it ends."""
    t, total = translation, translation.settings.get("train.global_batch")
    each = total.value if total is not None else None
    steps = t.settings["train.steps"].value if "train.steps" in t.settings else None
    if each is not None and _counts_samples(t, each):
        reason = "the rate of a run by samples follows these, and they are no whole number of equal steps"
        t.put("lr_schedule.unit", "samples", reason=reason)
        each, steps = 1, t.integer("train_samples")
    name, key = t.text("lr_decay_style", "linear"), "lr_decay_style"
    name = name if name.lower() != "wsd" else "WSD"
    kind = annealed(t.text("lr_wsd_decay_style", "exponential")) if name == "WSD" else _STYLES.get(name)
    warmup, source = _warmup(t, each, steps)
    if kind is None:
        t.judge(key, "refused", f'{name} has no counterpart; write lr_schedule.use = "module:callable"')
        kind = name = "constant"
    t.put("lr_schedule.use", kind, key, reason=_default(t, key))
    t.put("lr_schedule.warmup", warmup, *([source] if source else []), reason=None if source else _TITLE)
    _judge_warmup(t, source, _until(t, each, steps))
    _start(t, kind, warmup)
    if name != "constant":
        _floor(t)
    _length(t, name, each, steps)
    t.judge(key, "carried", to="lr_schedule.use")
    for one in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup"):
        t.judge(one, "meaningless" if not t.get(one) else "ignored-there", "another flag has the warm-up")
    t.judge("min_lr", "meaningless", "no decay")
    for one in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_style", "lr_wsd_decay_iters"):
        t.judge(one, "meaningless", "not of this style, or the whole run")
    t.judge("lr_wsd_decay_samples", "meaningless", "not of this style")


def _until(t: Translation, each: int | None, steps: int | None) -> int | None:
    """Return when the fall ends that a fraction of warm-up is of: in steps, or in samples where these are counted."""
    samples = t.integer("lr_decay_samples") or 0
    return t.integer("lr_decay_iters") or (samples // each if samples and each else steps)


def _judge_warmup(t: Translation, source: str | None, until: int | None) -> None:
    if source is None:
        return
    if source == "lr_warmup_fraction":
        length = (t.number(source) or 0.0) * (until or 0)
        if abs(length - round(length)) > 1e-6:
            t.judge(source, "changed", f"{length:g} of them there, a whole number here", to="lr_schedule.warmup")
    verdict = "derived" if source in ("lr_warmup_fraction", "lr_warmup_samples") else "carried"
    t.judge(source, verdict, to="lr_schedule.warmup")


def _start(t: Translation, kind: str, warmup: int | float) -> None:
    """State where the warm-up begins; without one, the inverse square root is of samples."""
    first, highest = t.number("lr_warmup_init", 0.0) or 0.0, t.number("lr")
    if warmup:
        start = min(first / highest, 1.0) if highest else 0.0
        t.put("lr_schedule.warmup_start", start, "lr_warmup_init", reason=_default(t, "lr_warmup_init"))
        t.judge("lr_warmup_init", "derived", "lr-warmup-init / lr", to="lr_schedule.warmup_start")
    elif kind == "inverse_sqrt":
        t.put("lr_schedule.warmup", 1, reason=f"{_TITLE}: the second step has the rate of the first")
        t.put("lr_schedule.warmup_start", 1.0, reason="no warm-up")
        if "train.global_batch" in t.settings:  # its root is one of samples, from the first one on
            t.put("lr_schedule.unit", "samples", reason=f"{_TITLE}: 1 / sqrt of the samples before the step")
    t.judge("lr_warmup_init", "meaningless", "no warm-up")


def _warmup(t: Translation, each: int | None, steps: int | None) -> tuple[int | float, str | None]:
    fraction = t.number("lr_warmup_fraction")
    if fraction:
        until = _until(t, each, steps)
        if until and isinstance(steps, int):
            return round(fraction * until), "lr_warmup_fraction"
        return (float(fraction) if fraction <= 1 else int(fraction)), "lr_warmup_fraction"
    count = t.integer("lr_warmup_iters")
    if count:
        return count, "lr_warmup_iters"
    samples = t.integer("lr_warmup_samples")
    if samples and each:
        return max(samples // each, 1), "lr_warmup_samples"
    return 0, None


def _floor(t: Translation) -> None:
    lowest, highest = t.number("min_lr", 0.0) or 0.0, t.number("lr")
    ratio = min(max(lowest / highest, 0.0), 1.0) if highest else 0.0
    t.put("lr_schedule.min_ratio", ratio, "min_lr", "lr", reason=_default(t, "min_lr"))
    t.judge("min_lr", "derived", "min-lr / lr", to="lr_schedule.min_ratio")


def _length(t: Translation, name: str, each: int | None, steps: int | None) -> None:
    """State how long the rate falls, and in which iteration it has fallen."""
    if name == "WSD":
        decay = t.integer("lr_wsd_decay_iters") or ((t.integer("lr_wsd_decay_samples") or 0) // (each or 1))
        source = "lr_wsd_decay_iters" if t.get("lr_wsd_decay_iters") else "lr_wsd_decay_samples"
        if decay:
            t.put("lr_schedule.decay", decay, source)
            t.judge(source, "carried", to="lr_schedule.decay")
        t.judge("lr_wsd_decay_style", "carried", to="lr_schedule.use")
    over_samples = "lr_schedule.unit" in t.settings and name not in ("constant", "inverse-square-root")
    if over_samples and "lr_decay_samples" not in t:  # the last step may go beyond, or not come to it
        t.put("lr_schedule.decay_end", steps, "train_samples", reason=_TITLE)
    for key, unit in (("lr_decay_iters", 1), ("lr_decay_samples", each or 1)):
        stated = t.integer(key)
        ends = None if stated is None else stated // unit
        if ends is None or steps is None or (ends == steps and not over_samples) or name == "constant":
            t.judge(key, "equal" if name != "constant" else "meaningless", "the whole run")
        elif name == "inverse-square-root":
            note = f"from iteration {ends} on the rate is min-lr there"
            t.judge(key, "changed" if ends < steps else "equal", note if ends < steps else "the run ends before")
        else:
            t.put("lr_schedule.decay_end", ends, key)
            t.judge(key, "carried" if unit == 1 else "derived", to="lr_schedule.decay_end")
