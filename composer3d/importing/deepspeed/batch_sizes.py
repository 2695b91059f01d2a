"""Batch sizes, accumulation and clipping of a DeepSpeed file."""

from __future__ import annotations

from composer3d.errors import Problem, did_you_mean
from composer3d.importing.automatic import resolve
from composer3d.importing.translation import Translation

__all__ = ["batch", "clipping", "data_degree"]

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def data_degree(translation: Translation) -> int | None:
    """Return the number of data-parallel ranks: --world-size without model parallelism, or None."""
    world = translation.options.world_size
    if world is None:
        return None
    others = 1
    for path in ("mesh.tp", "mesh.pp", "mesh.cp"):
        others *= translation.settings[path].value if path in translation.settings else 1
    return max(world // others, 1)


def batch(translation: Translation) -> None:
    """Carry the three batch sizes, of which DeepSpeed computes the one that is not there."""
    t = translation
    micro = _size(t, _MICRO, "per_device_train_batch_size")
    steps = _size(t, _STEPS, "gradient_accumulation_steps")
    total = None if t.get(_TOTAL) == "auto" and t.options.arguments is not None else _size(t, _TOTAL, None)
    degree = data_degree(t)
    if total is not None and micro is not None and steps is not None:
        _all_three(t, total, micro, steps, degree)
    elif total is not None:
        _of_the_total(t, total, micro, steps, degree)
    elif micro is not None or steps is not None:
        _without_total(t, micro, steps or 1, degree)
    elif not any(key in t for key in (_TOTAL, _MICRO, _STEPS)):
        _without_sizes(t)


def _without_sizes(t: Translation) -> None:
    """Report that DeepSpeed raises without a batch size, at the key that was meant as one if there is such."""
    message = f"neither {_TOTAL} nor {_MICRO} is stated: DeepSpeed raises, unless a trainer adds them"
    for key in t.tree.leaves:
        if t.table.entry_of(key) is not None:
            continue
        hint = did_you_mean(key, (_TOTAL, _MICRO, _STEPS))
        if hint is not None and hint.startswith("did you mean"):
            t.refuse(key, f"{message}; {hint}")
            return
    t.problems.append(Problem(message=message, file=t.tree.file, severity="warning"))


def _size(t: Translation, key: str, name: str | None) -> int | None:
    if t.get(key) != "auto":
        return t.integer(key, least=1)
    found = resolve(t, key, name)
    return found if isinstance(found, int) else None


def _all_three(t: Translation, total: int, micro: int, steps: int, degree: int | None) -> None:
    if total % (micro * steps) or (degree is not None and total != micro * steps * degree):
        product = f"{_MICRO} x {_STEPS} x "
        if degree is None:
            product += f"a number of ranks, a multiple of {micro * steps}"
        else:
            product += f"{degree} data-parallel ranks = {micro * steps * degree}"
        t.wrong(_TOTAL, f"is not {product}: DeepSpeed raises")
        for key in (_MICRO, _STEPS):
            t.judge(key, "refused", f"contradicts {_TOTAL}: DeepSpeed raises")
        return
    t.put("train.global_batch", total, _TOTAL)
    t.put("train.microbatch", micro, _MICRO)
    t.judge(_TOTAL, "carried", to="train.global_batch")
    t.judge(_MICRO, "carried", to="train.microbatch")
    t.judge(
        _STEPS,
        "derived",
        f"{total} = {micro} x {steps} x {total // (micro * steps)} data-parallel ranks",
        to="train.global_batch",
    )


def _of_the_total(t: Translation, total: int, micro: int | None, steps: int | None, degree: int | None) -> None:
    t.put("train.global_batch", total, _TOTAL)
    t.judge(_TOTAL, "carried", to="train.global_batch")
    if micro is not None:
        t.put("train.microbatch", micro, _MICRO)
        t.judge(_MICRO, "carried", to="train.microbatch")
    elif degree is not None and not t.get(_STEPS) == "auto":
        size = total // (degree * (steps or 1))
        t.put("train.microbatch", max(size, 1), _STEPS, reason=f"{total} / ({steps or 1} x {degree} ranks)")
        t.judge(_STEPS, "derived", f"microbatch = {total} / ({steps or 1} x {degree})", to="train.microbatch")
    elif steps is not None:
        if not t.is_run and steps == 1:
            t.judge(_STEPS, "equal", "the loop's batch is one micro-batch where microbatch is not stated")
        note = f"the micro-batch is {total} / ({steps} x ranks): give --world-size; gradients do not depend on it"
        t.judge(_STEPS, "changed", note)


def _without_total(t: Translation, micro: int | None, steps: int, degree: int | None) -> None:
    if micro is None:
        t.judge(_STEPS, "refused", f"neither {_TOTAL} nor {_MICRO} is stated: DeepSpeed raises")
        return
    t.put("train.microbatch", micro, _MICRO)
    t.judge(_MICRO, "carried", to="train.microbatch")
    if degree is not None:
        formula = f"{micro} x {steps} x {degree} data-parallel ranks"
        t.put("train.global_batch", micro * steps * degree, _STEPS, reason=formula)
        t.judge(_STEPS, "derived", f"global_batch = {formula}", to="train.global_batch")
        t.judge(_TOTAL, "derived", f"global_batch = {formula}", to="train.global_batch")
        return
    if steps == 1:
        t.judge(_STEPS, "equal", "global_batch is microbatch x data-parallel degree by default")
    elif not t.is_run:
        t.loop.append(f"with run.accumulate({steps}):  # {_STEPS}, around forward, backward and optimizer.step()")
        t.judge(_STEPS, "derived", f"the loop's own: run.accumulate({steps}); or give --world-size")
    else:
        t.put("train.accumulate", steps, _STEPS)
        t.judge(_STEPS, "carried", to="train.accumulate")
    t.judge(_TOTAL, "derived", "microbatch x accumulation x data-parallel degree")


def clipping(translation: Translation) -> None:
    """Carry the clipping norm, whose default differs between DeepSpeed's versions."""
    t, key = translation, "gradient_clipping"
    if key not in t:
        if _is_before(t.options.version, (0, 19, 3)):
            t.put(
                "train.grad_clip", float("inf"), reason="DeepSpeed's default before 0.19.3: gradients are not clipped"
            )
        else:
            t.put("train.grad_clip", 1.0, reason="DeepSpeed's default since 0.19.3; --source-version says another")
        return
    stated = resolve(t, key, "max_grad_norm")
    if stated is None:
        return
    norm = stated if t.get(key) == "auto" else t.number(key)
    if norm is None:
        return
    value = float(norm) if norm > 0 else float("inf")
    t.put("train.grad_clip", value, key, reason="" if norm > 0 else "0 clips nothing")
    note = "" if t.is_run else f"run.clip_grad_norm_({value})" if norm > 0 else "nothing is clipped"
    t.judge(key, "carried", note, to="train.grad_clip")


def _is_before(version: str | None, than: tuple[int, ...]) -> bool:
    if version is None:
        return False
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return bool(parts) and parts < than
