"""Functions of neighbouring positions: convolutions and shifts along a sharded sequence, and padding of it.

A rank needs a few positions beside its own for them, not the whole sequence. Padding makes several sequences of one:
zeros, the sequence, zeros, each of which is sharded. A convolution that is padded at both ends, of whose result causal
models drop the end, has two: the sequence, and what is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer3d.propagation.functions.depthwise import CONVOLUTIONS, arguments_of
from composer3d.propagation.sequences.attention_call import Reach
from composer3d.propagation.shards import ShardSpec

__all__ = ["Neighbours", "Padding", "neighbours_of", "padding_of", "sums_channels"]


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """A function of neighbours.

    Args:
        reach: The positions that it reads.
        of_windows: Computes it of windows; windows one after another have results that belong to none between them.
        is_causal: Whether no position reads what follows it.
    """

    reach: Reach
    of_windows: Callable[[Tensor], Tensor]
    is_causal: bool

    @property
    def span(self) -> int:
        """Positions by which a window is longer than its results."""
        return self.reach.before + self.reach.after


def neighbours_of(
    func: Any, name: str, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec
) -> Neighbours | None:
    """Return what a function reads beside each position of its first argument; None where it is no such function.

    Args:
        func: The function.
        name: Its name.
        args: Its arguments, the first of which is sharded.
        options: Its keyword arguments.
        spec: Of the first.
    """
    if name in CONVOLUTIONS:
        return _of_convolution(func, args, options, spec)
    padding = padding_of(name, args, options, spec)
    if padding is None or padding.value or min(padding.before, padding.after) >= 0:
        return None
    parts = _written(spec.placed.parts, sum(spec.placed.parts) + padding.before + padding.after)
    if parts is None:
        return None
    reach = Reach(read=spec.placed.parts, written=parts, before=padding.before, after=-padding.before)
    is_causal = padding.before >= 0 and len(spec.placed.parts) == 1
    return Neighbours(reach=reach, of_windows=padding.of_others, is_causal=is_causal)


def sums_channels(name: str, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec) -> bool:
    """Return whether a function is a convolution that takes the sharded dim for channels, and sums over them."""
    if name not in CONVOLUTIONS:
        return False
    given = arguments_of(args, options)
    weight = given["weight"]
    is_of_channels = spec.placed.dim == spec.shadow.ndim - weight.ndim + 1
    return is_of_channels and (given.get("groups", 1) == 1 or weight.shape[1] > 1)


def _of_convolution(func: Any, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec) -> Neighbours | None:
    given = arguments_of(args, options)
    num_dims = given["weight"].ndim - 2
    at = spec.placed.dim - (spec.shadow.ndim - num_dims)
    if at < 0:
        return None
    stride, padding, dilation = (
        _each(given.get(key, default), num_dims) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    spans = [each * (size - 1) for each, size in zip(dilation, given["weight"].shape[2:], strict=True)]
    if stride[at] != 1:
        return None
    if padding[0] == "valid":
        padding = [0] * num_dims
    if padding[0] == "same":
        before, after = spans[at] // 2, spans[at] - spans[at] // 2
        if any(span % 2 for span in spans):
            return None
        padding = [span // 2 for span in spans]
    else:
        before = after = padding[at]
    parts = _written(spec.placed.parts, sum(spec.placed.parts) + before + after - spans[at])
    if parts is None:
        return None
    others = [0 if index == at else each for index, each in enumerate(padding)]
    rest = {**{key: value for key, value in given.items() if key != "input"}, "padding": others}
    lead = sum(spec.placed.parts[: spec.placed.parts.index(max(spec.placed.parts))])
    return Neighbours(
        reach=Reach(read=spec.placed.parts, written=parts, before=before, after=spans[at] - before),
        of_windows=lambda x: func(x, **rest),
        is_causal=spans[at] - before <= lead,
    )


def _each(value: Any, num: int) -> list[Any]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * num if len(values) == 1 else values


def _written(parts: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    """Return the lengths of a result's sequences: the longest that was read, and what is left."""
    longest = max(parts)
    if length < longest:
        return None
    return (longest,) if length == longest else (longest, length - longest)


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Padding of a sequence.

    Args:
        before: Positions that are added before the first; dropped where negative.
        after: Likewise after the last.
        value: What they have.
        of_others: Pads the other dims.
    """

    before: int
    after: int
    value: float
    of_others: Callable[[Tensor], Tensor]

    def around(self, x: Tensor, dim: int, local: Callable[[int], int]) -> Tensor:
        """Return a rank's shard of the padded sequence: of what is added each rank has its positions."""
        pieces = []
        for size in (local(self.before), local(self.after)):
            shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
            pieces.append(torch.full(shape, self.value, dtype=x.dtype, device=x.device))
        return self.of_others(torch.cat([pieces[0], x, pieces[1]], dim))

    def parts(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the sequences that follow one another then."""
        return tuple(part for part in (self.before, *parts, self.after) if part)


def padding_of(name: str, args: Sequence[Any], options: Mapping[str, Any], spec: ShardSpec) -> Padding | None:
    """Return what `pad` does to a sharded sequence; None for other functions, and for padding that reads values."""
    if name != "pad":
        return None
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **options}
    pad, at = list(given["pad"]), 2 * (spec.shadow.ndim - 1 - spec.placed.dim)
    if given.get("mode", "constant") != "constant" or not any(pad[at : at + 2]):
        return None
    before, after = pad[at], (pad[at + 1 : at + 2] or [0])[0]
    value = given.get("value") or 0.0
    others = [0 if index in (at, at + 1) else each for index, each in enumerate(pad)]
    return Padding(
        before=before,
        after=after,
        value=value,
        of_others=lambda x: torch.nn.functional.pad(x, others, "constant", value) if any(others) else x,
    )
