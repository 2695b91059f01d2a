"""Micro-batches: splitting a batch along dim 0, moving it to the device, and a digest that identifies it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.errors import BatchError
from composer3d.interfaces import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Digest",
    "Splitter",
    "first_tensor",
    "map_tensors",
    "num_samples",
    "split_batch",
    "tensors",
    "to_device",
    "units_of",
]

_PIECE = 1 << 16  # weights generated per seed


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in nested dicts, lists, tuples and dataclasses."""
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if _is_output(value):
        mapped = copy.copy(value)
        for name in _names(value):
            found = getattr(value, name)
            if (new := map_tensors(function, found)) is not found:
                # Of a frozen one too, and without what its class does when one is made.
                set_item = mapped.__setitem__ if isinstance(value, Mapping) else partial(object.__setattr__, mapped)
                set_item(name, new)
        return mapped
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dicts, lists, tuples and dataclasses, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif _is_output(value):
        for name in _names(value):
            yield from tensors(getattr(value, name))
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def _is_output(value: Any) -> bool:
    """Return whether a value is an object of a dataclass, as models return them, of a field or several."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _names(value: Any) -> list[str]:
    """Return names of what an output holds: transformers' leave out the fields that are None."""
    return list(value) if isinstance(value, Mapping) else [field.name for field in dataclasses.fields(value)]


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor with dims in nested dicts, lists and tuples; None where there is none."""
    import torch

    if isinstance(value, torch.Tensor):
        return value if value.dim() else None
    # Asked several times in every step: the frequent kinds first, and no generators.
    if isinstance(value, tuple | list):
        items: Iterable[Any] = value
    elif isinstance(value, Mapping):
        items = value.values()
    elif _is_output(value):
        items = [getattr(value, name) for name in _names(value)]
    else:
        return None
    for item in items:
        if (found := first_tensor(item)) is not None:
            return found
    return None


def num_samples(value: Any) -> int | None:
    """Return the leading dim of the first tensor that has dims, which is the batch's; None where there is none."""
    first = first_tensor(value)
    return None if first is None else first.shape[0]


def units_of(inputs: Any) -> tuple[Literal["tokens", "samples"], int]:
    """Return the unit of throughput, tokens or samples, and how many of them a model's inputs have.

    Inputs of int32 or int64 are token ids, the dtypes that an embedding takes: each position is a token, padding
    included. For any other first tensor, such as pixels, the unit is a sample. Plans, runs and plugins count alike.

    Args:
        inputs: A model's inputs: a tensor, or a nested container of them, such as the `args` of a `Batch`.
    """
    import torch

    first = first_tensor(inputs)
    if first is None:
        return "samples", 0
    if first.dtype in (torch.int32, torch.int64):
        return "tokens", first.numel()
    return "samples", first.shape[0]


def split_batch(batch: Batch, size: int | None) -> list[Batch]:
    """Split a batch x_B... into micro-batches of `size` samples along dim 0.

    Tensors with another first dim, and values that are no tensors, are passed unchanged to every micro-batch; a target
    must contain a tensor with the batch's first dim. A batch of one micro-batch is returned as it is, with a target of
    any length.

    Raises:
        BatchError: The batch is not a multiple of `size`, or its target has another number of samples.
    """
    length = None if size is None else num_samples((batch.args, batch.kwargs, batch.target))
    if size is None or length is None or length == size:
        return [batch]
    if length % size or not length:
        raise BatchError(
            f"a batch of {length} samples cannot be split into micro-batches of {size} ([train] microbatch); "
            f"hand over a multiple of {size} samples a call"
        )
    _refuse_other_target(batch.target, size, length)
    return [
        Batch(
            args=tuple(_slice(batch.args, start, size, length)),
            kwargs=_slice(batch.kwargs, start, size, length),
            target=_slice(batch.target, start, size, length),
            copy=batch.copy,
        )
        for start in range(0, length, size)
    ]


class Splitter:
    """Splits a loop's batches as `split_batch`, and remembers which arguments were divided.

    A tensor that is no row a sample (positions, a mask of S x S) is divided as soon as a batch happens to have as many
    samples as it has rows, and its pieces would broadcast.
    """

    def __init__(self) -> None:
        self._is_divided: dict[str, tuple[bool, int]] = {}  # by argument, with the samples of that batch

    def __call__(self, batch: Batch, size: int | None) -> list[Batch]:
        """Split a batch.

        Raises:
            BatchError: As `split_batch`, or an argument is divided that was passed whole before, or the other way.
        """
        found = split_batch(batch, size)
        if len(found) == 1:
            return found
        length = num_samples((batch.args, batch.kwargs, batch.target)) or 0
        arguments = {**{f"argument {place}": value for place, value in enumerate(batch.args)}, **batch.kwargs}
        for name, value in arguments.items():
            for place, tensor in enumerate(tensors(value)):
                if tensor.dim() and tensor.shape[0] != 1:
                    self._look(f"{name}, tensor {place}" if place else name, tensor.shape[0], length)
        return found

    def _look(self, name: str, rows: int, length: int) -> None:
        was_divided, before = self._is_divided.setdefault(name, (rows == length, length))
        if was_divided == (rows == length):
            return
        now = f"of {length} samples it has {rows} rows and would be {'passed whole' if was_divided else 'divided'}"
        raise BatchError(
            f'"{name}" was {"divided among" if was_divided else "passed whole to"} the micro-batches of a batch of '
            f"{before} samples, and in this one {now}; give a tensor that holds no row for each sample a leading dim "
            "of 1 (x[None]), so that it is never divided"
        )


def _refuse_other_target(target: Any, size: int, length: int) -> None:
    """Refuse a target that every micro-batch would receive whole; a single row is valid for every sample."""
    labels = target.get("labels") if isinstance(target, Mapping) else None
    lengths = [t.shape[0] for t in tensors(target if labels is None else labels) if t.dim() and t.shape[0] != 1]
    if lengths and length not in lengths:
        raise BatchError(
            f"the batch has {length} samples and its target {lengths[0]}, so every micro-batch of {size} ([train] "
            f"microbatch) would be given the whole target; hand over a row a sample (a target of tokens as "
            f"target.view({length}, -1), pairs as inputs of 2 a sample), or one micro-batch a call"
        )


def _slice(value: Any, start: int, size: int, length: int) -> Any:
    return map_tensors(lambda t: t[start : start + size] if t.dim() and t.shape[0] == length else t, value)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a batch; copies from pinned memory are asynchronous."""
    if device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)

    return dataclasses.replace(batch, args=move(batch.args), kwargs=move(batch.kwargs), target=move(batch.target))


class Digest:
    """Digest of batches: the dot product of each tensor's 64-bit words with random weights.

    One pass over a batch on the CPU. A batch on an accelerator is synchronised.

    Memory: 8 bytes of weights for every 8 bytes of the largest tensor so far; twice that on an accelerator while the
    digest is computed.
    """

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}

    def __call__(self, value: Any) -> int:
        """Return a number below 2^62 that differs almost surely where tensors differ; 0 if there are none."""
        total = 0
        with torch_compat.outside_transforms():
            for position, each in enumerate(tensors(value)):
                tensor = torch_compat.untransformed(each)
                shape = hash(tuple(tensor.shape))
                total += (position + 1) * (self._dot(tensor.detach()) ^ shape)
        return total % (1 << 62)

    def _dot(self, tensor: Tensor) -> int:
        words = _words(tensor)
        weights = self._weights_of(words)
        if words.device.type == "cpu":
            return int(words.dot(weights))
        return int((words * weights).sum())  # accelerators have no dot of integers

    def _weights_of(self, words: Tensor) -> Tensor:
        import torch

        device, count = str(words.device), words.numel()
        weights = self._weights.get(device)
        if weights is None or weights.numel() < count:
            # One seed per piece, so that weights are equal on all ranks, independent of the sizes seen before.
            pieces = [
                torch.randint(-(1 << 62), 1 << 62, (_PIECE,), generator=torch.Generator().manual_seed(seed))
                for seed in range(-(-count // _PIECE))
            ]
            weights = torch.cat(pieces or [words.cpu()]).to(words.device)
            self._weights[device] = weights
        return weights[:count]


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as 64-bit words; one word per byte where they are no multiple of 8 or unaligned."""
    import torch

    flat = tensor.reshape(-1)
    if flat.dtype is torch.int64:
        return flat
    if not flat.is_contiguous():
        flat = flat.contiguous()
    size = flat.element_size()
    if size * flat.numel() % 8 == 0 and size * flat.storage_offset() % 8 == 0 and flat.numel():
        return flat.view(torch.int64)
    return flat.view(torch.uint8).to(torch.int64)
