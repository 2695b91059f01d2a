"""Cutting batches into micro-batches, and recognising them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d.errors import BatchError
from composer3d.protocol import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["cut", "digest", "map_tensors", "tensors", "to_device"]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists and tuples."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dicts, lists and tuples, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    yield from found


def cut(batch: Batch, size: int | None) -> list[Batch]:
    """Cut a batch into micro-batches of `size` samples along dim 0.

    Tensors whose first dim is not the batch's, and everything that is no tensor, go whole into every micro-batch.

    Raises:
        BatchError: The batch does not divide.
    """
    first = next((t for t in tensors((batch.args, batch.kwargs, batch.target)) if t.dim()), None)
    if size is None or first is None or first.shape[0] == size:
        return [batch]
    length = first.shape[0]
    if length % size or not length:
        raise BatchError(
            f"a batch of {length} samples cannot be cut into micro-batches of {size} ([train] microbatch); "
            f"hand over a multiple of {size} samples a call"
        )
    return [
        Batch(
            args=tuple(_slice(batch.args, start, size, length)),
            kwargs=_slice(batch.kwargs, start, size, length),
            target=_slice(batch.target, start, size, length),
        )
        for start in range(0, length, size)
    ]


def _slice(value: Any, start: int, size: int, length: int) -> Any:
    return map_tensors(lambda t: t[start : start + size] if t.dim() and t.shape[0] == length else t, value)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a batch; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)

    return Batch(args=move(batch.args), kwargs=move(batch.kwargs), target=move(batch.target))


def digest(batch: Batch) -> int:
    """Return a number that differs, all but surely, between batches of other content; below 2^40."""
    import torch

    result = 0
    for position, tensor in enumerate(tensors((batch.args, batch.kwargs, batch.target))):
        flat = tensor.detach().reshape(-1)
        values = (
            flat.to(torch.int64) if not flat.is_floating_point() else flat.to(torch.float32).view(torch.int32).long()
        )
        weights = torch.arange(1, values.numel() + 1, device=values.device) % 65_521
        result += (position + 1) * int((values * weights).sum())
    return result % (1 << 40)
