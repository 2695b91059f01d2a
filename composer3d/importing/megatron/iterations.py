"""Batches and iterations of a Megatron-LM run."""

from __future__ import annotations

from collections.abc import Mapping

from composer3d.importing.translation import Translation

__all__ = ["batch"]

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
        if start >= total:
            t.judge(
                key, "equal" if start == total else "refused", f"the global batch is {total} from the first step on"
            )
        elif t.integer("train_iters"):
            t.wrong(key, "stands beside train-iters: Megatron-LM refuses a ramp but by train-samples")
        elif not step or (total - start) % step:
            t.wrong(key, f"does not grow from {start} to {total} in whole steps, which Megatron-LM refuses")
        elif samples:
            t.put("train.batch_ramp", {"start": start, "step": step, "samples": samples}, key)
            t.judge(key, "carried", to="train.batch_ramp")
        t.judge(key, "equal", "it ends before the first step")
    t.judge(key, "refused" if stated else "meaningless", "needs three numbers and global-batch-size")
    key = "step_batch_size_schedule"
    t.judge(key, "missing" if t.get(key) else "meaningless", "a schedule of batch sizes; train.batch_ramp is one")


def _iterations(t: Translation, total: int | None) -> None:
    steps, samples = t.integer("train_iters"), t.integer("train_samples")
    if steps:
        t.carry("train_iters", "train.steps", steps)
    elif samples and total and "train.batch_ramp" in t.settings:
        steps = _steps_of(samples, total, t.settings["train.batch_ramp"].value)
        t.put("train.steps", steps, "train_samples", reason="steps until so many samples are consumed, by the ramp")
        t.judge("train_samples", "derived", f"{steps} steps of the ramp have {samples} samples", to="train.steps")
    elif samples and total:
        t.put("train.steps", max(samples // total, 1), "train_samples", reason=f"/ global batch {total}")
        t.judge("train_samples", "derived", f"{samples} samples / {total}", to="train.steps")
    t.judge("train_samples", "refused" if samples and not steps else "meaningless", "samples need global-batch-size")
    t.judge("train_iters", "meaningless", "none")


def _steps_of(samples: int, total: int, ramp: Mapping[str, int]) -> int:
    """Return Megatron-LM's number of iterations for so many samples: those of the ramp, then whole global batches."""
    from composer3d.runner import BatchRampTable, BatchSize, TrainTable

    table = BatchRampTable(start=ramp["start"], step=ramp["step"], samples=ramp["samples"])
    sizes = BatchSize(TrainTable(steps=1, global_batch=total, batch_ramp=table), degree=1)
    end = min(samples, ramp["samples"])
    low, high = 0, end // ramp["start"] + 1
    while low < high:  # the first step before which more samples than that lie
        middle = (low + high) // 2
        low, high = (low, middle) if sizes.position_of(middle) > end else (middle + 1, high)
    return max(low + max(samples - sizes.position_of(low), 0) // total, 1)
