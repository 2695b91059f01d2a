"""Calls of operators as a trace counts them: name, dtype, shapes, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from composer3d import torch_compat
from composer3d.planning.tracing.traced import HOST_COPY, WAITED_COPY

__all__ = ["Calls", "calls_of", "flat", "form_of", "host_copy"]

# Of equal operators: name, dtype, shapes, FLOPs and bytes of one call.
Calls = tuple[str, str, tuple[tuple[int, ...], ...], int, int]


def form_of(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what of arguments decides what is counted: shapes and dtypes of tensors, and all else."""
    forms: list[Any] = []
    for value in values:
        if hasattr(value, "untyped_storage"):
            forms += (value.shape, value.dtype)
        elif isinstance(value, list | tuple):
            forms.append(form_of(value))
        else:
            forms.append(value)
    return tuple(forms)


def calls_of(name: str, operator: Any, args: Any, kwargs: Any, result: Any) -> Calls:
    """Return what is counted of a call of an operator."""
    tensors = [arg for arg in flat((*args, *kwargs.values())) if hasattr(arg, "untyped_storage")]
    made = [leaf for leaf in flat((result,)) if hasattr(leaf, "untyped_storage")]
    floating = next((t for t in (*tensors, *made) if t.is_floating_point()), None)
    written = torch_compat.written_tensors(operator, args, kwargs) if torch_compat.is_in_place(operator) else made
    sizes = sum(t.numel() * t.element_size() for t in (*tensors, *flat((written,))))
    dtype = "" if floating is None else str(floating.dtype).removeprefix("torch.")
    flops = int(torch_compat.num_flops(operator, args, kwargs, result))
    return name, dtype, tuple(tuple(t.shape) for t in tensors), flops, sizes


def host_copy(args: tuple[Any, ...], result: Any, *, waits: bool) -> Calls:
    """Return what is counted of a copy between host and device: what it has read or written there, once."""
    moved = next(leaf for leaf in flat((result, *args)) if hasattr(leaf, "untyped_storage"))
    dtype = str(moved.dtype).removeprefix("torch.")
    return WAITED_COPY if waits else HOST_COPY, dtype, (tuple(moved.shape),), 0, moved.numel() * moved.element_size()


def flat(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield values, those inside of lists and tuples too."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(tuple(value))
        else:
            yield value
