"""Operands of functions on a sharded sequence: whole ones are indexed by position, shards are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.functions.whole_operands import Meeting
from composer3d.propagation.sequences.attention_call import Reach, SequenceRules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequenceOperands", "gather_along", "gather_parts", "windows_along"]


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """A whole tensor beside the shard that it was gathered from, as long as neither is written into.

    Args:
        whole: All positions.
        placed: Of the shard.
        versions: Of both.
    """

    whole: Tensor
    placed: Placed
    versions: tuple[int, ...]


class SequenceOperands(Meeting):
    """Replicated operands of functions on a sharded sequence: each rank takes its positions of them by index.

    Attributes:
        lengths: Of the sequences that were gathered.
    """

    def __init__(self, degree: int, mesh: DeviceMesh | None, rules: SequenceRules) -> None:
        super().__init__(degree, mesh)
        self._rules = rules
        self.lengths: set[int] = set()
        # Kept while the shard lives: a loop over positions indexes the same tensor once for each.
        self._kept = WeakTensorKeyDictionary()
        self._shards = WeakTensorKeyDictionary()
        self._indexed_once = WeakTensorKeyDictionary()

    def _with_summed_gradient(self, whole: Tensor) -> Tensor:
        return whole

    def narrowed(self, whole: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's positions of a replicated tensor; of one without gradient, once for all that use it."""
        self.num_acts += 1
        self.num_moves += 1
        if whole.requires_grad:
            return self.indexed(whole, dim, parts)
        kept = self._indexed_once.setdefault(whole, {})
        key = (dim, parts, *_versions(whole))
        if key not in kept:
            kept[key] = self.indexed(whole, dim, parts)
        # An alias: who marks it, or writes into what it got, has one of its own.
        share: Tensor = kept[key]
        return share.view_as(share)

    def indexed(self, whole: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's positions of a replicated tensor, in memory of their own."""
        pieces = [
            piece.index_select(dim, self._rules.index(size, piece.device))
            for piece, size in zip(whole.split(list(parts), dim), parts, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def gathered(self, share: Tensor, placed: Placed, *, is_summed: bool) -> Tensor:
        """Gather all positions; the gradient is reduce-scattered whatever is done with them."""
        self.num_acts += 1
        self.num_moves += 1
        self.lengths |= set(placed.parts)
        kept = self._kept.get(share)
        if kept is not None and kept.placed == placed and kept.versions == _versions(share, kept.whole):
            if kept.whole.requires_grad or not (share.requires_grad and torch.is_grad_enabled()):
                whole: Tensor = kept.whole
                return whole
        return gather_parts(share, placed, self._rules)

    def can_gather(self, placed: Placed) -> bool:
        """Return True: sequences one after another are gathered one by one."""
        return True

    def keep(self, share: Tensor, whole: Tensor, placed: Placed) -> None:
        """Keep what was gathered from a shard: views of it are views of what the shard is a part of."""
        self._kept[share] = _Gathered(whole=whole, placed=placed, versions=_versions(share, whole))
        # As of several sequences, what was gathered may itself be a view: what is written is known by the base.
        self._shards[whole if whole._base is None else whole._base] = TensorWeakRef(share)

    def write_back(self, written: Tensor) -> None:
        """Write into a shard what was written into the whole tensor, or a view of it, that was gathered from it."""
        reference = self._shards.get(written if written._base is None else written._base)
        share = None if reference is None else reference()
        if share is None:
            return
        kept = self._kept[share]
        share.copy_(self.indexed(kept.whole, kept.placed.dim, kept.placed.parts))
        self.keep(share, kept.whole, kept.placed)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return how often tensors were written into; those of inference mode do not count."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def gather_parts(share: Tensor, placed: Placed, rules: SequenceRules) -> Tensor:
    """Gather all positions of one sequence, or of several one after another; those of equal length in one go."""
    dim, num = placed.dim, len(placed.parts)
    if len(set(placed.parts)) > 1:
        shares = share.split([rules.local_length(part) for part in placed.parts], dim)
        pairs = zip(shares, placed.parts, strict=True)
        return torch.cat([gather_along(piece, dim, part, rules) for piece, part in pairs], dim)
    if num > 1:
        share, dim = share.unflatten(dim, (num, -1)), dim + 1
    whole = gather_along(share, dim, placed.parts[0], rules)
    return whole.flatten(dim - 1, dim) if num > 1 else whole


def gather_along(x: Tensor, dim: int, length: int, rules: SequenceRules) -> Tensor:
    """Gather all positions of a tensor; an inner axis that shards the same dim gathers its own shards first."""
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(_gather_along, (x,), x, dim, length, rules)
        return result
    return _gather_along(x, dim, length, rules)


def windows_along(x: Tensor, dim: int, reach: Reach, rules: SequenceRules) -> Tensor:
    """Return what this rank's positions of a result read; an inner axis gathers its shards of the dim first."""
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(_windows_along, (x,), x, dim, reach, rules)
        return result
    return _windows_along(x, dim, reach, rules)


def _gather_along(x: Tensor, dim: int, length: int, rules: SequenceRules) -> Tensor:
    if x.is_meta:
        return _valueless(x, dim, length)
    return rules.gather(x, dim=dim, length=length)


def _windows_along(x: Tensor, dim: int, reach: Reach, rules: SequenceRules) -> Tensor:
    if x.is_meta:
        return _valueless(x, dim, sum(rules.window_sizes(reach) or []))
    return rules.windows(x, dim=dim, reach=reach)


def _valueless(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor on meta that is no leaf, as code may write into it."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]], requires_grad=x.requires_grad).clone()


_gather_along.__name__ = "gather_along"
_windows_along.__name__ = "windows_along"
