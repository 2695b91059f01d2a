"""Batches, iterations and the rate's schedule of a Megatron-LM run."""

from __future__ import annotations

from composer3d.importing.translation import Translation

__all__ = ["batch", "schedule"]

_TITLE = "Megatron-LM's default"


def batch(translation: Translation) -> None:
    """Carry batch sizes, iterations, the length of sequences and clipping."""
    t = translation
    if "batch_size" in t:
        t.judge("batch_size", "refused" if "micro_batch_size" not in t else "meaningless", "an old name")
    micro, total = t.integer("micro_batch_size", least=1), t.integer("global_batch_size", least=1)
    if micro is not None:
        t.carry("micro_batch_size", "train.microbatch", micro)
    if total is not None:
        t.carry("global_batch_size", "train.global_batch", total)
    t.judge("global_batch_size", "equal", "micro-batch x data-parallel degree is the default here too")
    _ramp(t, total)
    _iterations(t, total)
    length = t.integer("seq_length", t.integer("encoder_seq_length"), least=1)
    if length is not None:
        source = "seq_length" if t.get("seq_length") is not None else "encoder_seq_length"
        t.carry(source, "data.seq_len", length)
    for key in ("seq_length", "encoder_seq_length"):
        t.judge(key, "meaningless", "another flag has the length")
    norm = t.number("clip_grad", 1.0) or 0.0
    t.put("train.grad_clip", float(norm) if norm > 0 else float("inf"), "clip_grad", reason=_default(t, "clip_grad"))
    t.judge("clip_grad", "carried", "" if norm > 0 else "0 clips nothing", to="train.grad_clip")
    key = "calculate_per_token_loss"
    note = "every valid token of the global batch weighs the same here, there a mean of micro-batches' means"
    t.judge(key, "equal" if t.flag(key) else "changed", "" if t.flag(key) else note)
    if "train.seed" not in t.settings:
        t.put("train.seed", 1234, reason=_TITLE)


def _default(t: Translation, key: str) -> str | None:
    return None if key in t else _TITLE


def _ramp(t: Translation, total: int | None) -> None:
    key = "rampup_batch_size"
    stated = t.get(key)
    stated = stated.split() if isinstance(stated, str) else stated
    if isinstance(stated, list) and len(stated) == 3 and all(str(one).isdigit() for one in stated) and total:
        start, step, samples = (int(one) for one in stated)
        plateaus = max((total - start) // max(step, 1), 1)
        middle = (start + total) / 2
        every = max(round(samples / plateaus / middle), 1)
        t.put("train.batch_ramp", {"start": start, "step": step, "every": every}, key)
        note = f"every size has {samples // plateaus} samples there, {every} steps here"
        t.judge(key, "changed", note, to="train.batch_ramp")
    t.judge(key, "refused" if stated else "meaningless", "needs three numbers and global-batch-size")
    key = "step_batch_size_schedule"
    t.judge(key, "missing" if t.get(key) else "meaningless", "a schedule of batch sizes; train.batch_ramp is one")


def _iterations(t: Translation, total: int | None) -> None:
    steps, samples = t.integer("train_iters"), t.integer("train_samples")
    if steps:
        t.carry("train_iters", "train.steps", steps)
    elif samples and total:
        t.put("train.steps", max(samples // total, 1), "train_samples", reason=f"/ global batch {total}")
        t.judge("train_samples", "derived", f"{samples} samples / {total}", to="train.steps")
    t.judge("train_samples", "refused" if samples and not steps else "meaningless", "samples need global-batch-size")
    t.judge("train_iters", "meaningless", "none")


def schedule(translation: Translation) -> None:
    """Carry the nearest schedule; Megatron-LM's warm-up begins at 0, which a note states."""
    t, total = translation, translation.settings.get("train.global_batch")
    each = total.value if total is not None else None
    steps = t.settings["train.steps"].value if "train.steps" in t.settings else None
    name = t.text("lr_decay_style", "linear").lower()
    warmup, source = _warmup(t, each, steps)
    kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant", "wsd": "wsd"}
    if name not in kinds:
        t.judge("lr_decay_style", "refused", f'{name} has no counterpart; write lr_schedule.use = "module:callable"')
        name = "constant"
    t.put("lr_schedule.use", kinds[name], "lr_decay_style", reason=_default(t, "lr_decay_style"))
    t.put("lr_schedule.warmup", warmup, *([source] if source else []), reason=None if source else _TITLE)
    t.judge(source or "", "carried" if "samples" not in (source or "") else "derived", to="lr_schedule.warmup")
    if name != "constant":
        _floor(t)
    _length(t, name, each, steps)
    note = "the rate begins at 0 there and a step later here; the decay is the same"
    t.judge("lr_decay_style", "changed" if warmup else "carried", note if warmup else "", to="lr_schedule.use")
    first = t.number("lr_warmup_init", 0.0)
    t.judge("lr_warmup_init", "changed" if first else "equal", f"warm-up begins at {first}" if first else "")
    for key in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup"):
        t.judge(key, "meaningless" if not t.get(key) else "ignored-there", "another flag has the warm-up")
    t.judge("min_lr", "meaningless", "no decay")
    for key in ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_style", "lr_wsd_decay_iters"):
        t.judge(key, "meaningless", "not of this style, or the whole run")
    t.judge("lr_wsd_decay_samples", "meaningless", "not of this style")


def _warmup(t: Translation, each: int | None, steps: int | None) -> tuple[int | float, str | None]:
    fraction = t.number("lr_warmup_fraction")
    if fraction:
        decay = t.integer("lr_decay_iters")
        if decay and isinstance(steps, int):
            return min(round(fraction * decay), steps), "lr_warmup_fraction"
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
    """State where the decay of the source ends elsewhere than the run."""
    if name == "wsd":
        decay = t.integer("lr_wsd_decay_iters") or ((t.integer("lr_wsd_decay_samples") or 0) // (each or 1))
        source = "lr_wsd_decay_iters" if t.get("lr_wsd_decay_iters") else "lr_wsd_decay_samples"
        if decay:
            t.put("lr_schedule.decay", decay, source)
            t.judge(source, "carried", to="lr_schedule.decay")
        style = t.text("lr_wsd_decay_style", "exponential").lower()
        note = f"the last steps fall by {style} there, in a straight line here"
        t.judge("lr_wsd_decay_style", "equal" if style == "linear" else "changed", note, to="lr_schedule.use")
    for key, unit in (("lr_decay_iters", 1), ("lr_decay_samples", each or 1)):
        stated = t.integer(key)
        ends = None if stated is None else stated // unit
        if ends is not None and steps is not None and abs(ends - steps) > max(steps // 1000, 1):
            t.judge(key, "changed", f"the rate falls until iteration {ends} there, until step {steps} here")
        t.judge(key, "equal" if stated is not None else "meaningless", "the whole run")
