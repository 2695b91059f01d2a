"""Operands of functions on a sharded sequence: whole ones are indexed by position, shards are gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from composer3d.propagation.attention_call import SequenceRules
from composer3d.propagation.view_shapes import Placed
from composer3d.propagation.whole_operands import Meeting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["SequenceOperands", "gather_along"]


class SequenceOperands(Meeting):
    """Replicated operands of functions on a sharded sequence: each rank takes its positions of them by index."""

    def __init__(self, degree: int, mesh: DeviceMesh | None, rules: SequenceRules) -> None:
        super().__init__(degree, mesh)
        self._rules = rules

    def _with_summed_gradient(self, whole: Tensor) -> Tensor:
        return whole

    def narrowed(self, whole: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
        """Return this rank's positions of a replicated tensor."""
        self.num_acts += 1
        self.num_moves += 1
        pieces = [
            piece.index_select(dim, self._rules.index(size, piece.device))
            for piece, size in zip(whole.split(list(parts), dim), parts, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def gathered(self, share: Tensor, placed: Placed, *, is_summed: bool) -> Tensor:
        """Gather all positions; the gradient is reduce-scattered whatever is done with them."""
        self.num_acts += 1
        self.num_moves += 1
        dim, num = placed.dim, len(placed.parts)
        if len(set(placed.parts)) > 1:
            shares = share.split([self._rules.local_length(part) for part in placed.parts], dim)
            pairs = zip(shares, placed.parts, strict=True)
            return torch.cat([gather_along(piece, dim, part, self._rules) for piece, part in pairs], dim)
        if num > 1:
            share, dim = share.unflatten(dim, (num, -1)), dim + 1
        whole = gather_along(share, dim, placed.parts[0], self._rules)
        return whole.flatten(dim - 1, dim) if num > 1 else whole

    def can_gather(self, placed: Placed) -> bool:
        """Return True: sequences one after another are gathered one by one."""
        return True


def gather_along(x: Tensor, dim: int, length: int, rules: SequenceRules) -> Tensor:
    """Gather all positions of a tensor; an inner axis that shards the same dim gathers its own shards first."""
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(_gather_along, (x,), x, dim, length, rules)
        return result
    return _gather_along(x, dim, length, rules)


def _gather_along(x: Tensor, dim: int, length: int, rules: SequenceRules) -> Tensor:
    if x.is_meta:
        return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]], requires_grad=x.requires_grad)
    return rules.gather(x, dim=dim, length=length)


_gather_along.__name__ = "gather_along"
