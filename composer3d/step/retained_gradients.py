"""Gradients that `retain_grad` keeps of activations, as one device has them: of all positions, and not scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.step.losses.inside_values import InsideValues

__all__ = ["RetainedGradients"]

# Of so many forwards the tensors are held that wait for a backward; a loop may run several before it.
_NUM_FORWARDS = 8


@dataclass(kw_only=True)
class _Retained:
    tensor: Callable[[], Tensor | None]
    whole: Callable[[Tensor], Tensor]
    forward: int
    before: Tensor | None = None


class RetainedGradients:
    """Replaces what a backward leaves in `.grad` of activations.

    Memory: where a sequence is sharded, gradients of all its positions. Collectives: one all-gather of each there, and
    one all-reduce of each that every rank has whole.

    Args:
        inside: Knows which activations are shards.
    """

    def __init__(self, inside: InsideValues) -> None:
        self._inside = inside
        self._found: list[_Retained] = []
        self._forward = 0

    def count_forward(self) -> None:
        """Drop what has waited for a backward too long."""
        self._forward += 1
        self._found = [each for each in self._found if self._forward - each.forward < _NUM_FORWARDS]

    def add(self, tensor: Tensor, *, is_output: bool = False) -> None:
        """Note an activation whose gradient is kept; it may be an output of the model."""
        if any(each.tensor() is tensor for each in self._found):
            return
        hooks = self._inside.hooks
        whole = (lambda gradient: gradient) if hooks is None else hooks.whole_of(tensor, is_output=is_output)
        # Held until the backward, so that all ranks have the same ones to gather then.
        self._found.append(_Retained(tensor=lambda: tensor, whole=whole, forward=self._forward))

    def begin(self) -> None:
        """Put gradients of earlier backwards aside, which torch would add other shapes to."""
        for each in self._found:
            if (tensor := each.tensor()) is not None and tensor.grad is not None:
                each.before, tensor.grad = tensor.grad, None

    def end(self, factor: float) -> None:
        """Make what a backward has left that of one device, which is `factor` times smaller."""
        for each in self._found:
            if (tensor := each.tensor()) is None or (gradient := tensor.grad) is None:
                continue
            # A shard's own size is another than the whole's, which torch compares when a gradient is assigned.
            gradient.data = each.whole(gradient) / factor
            if each.before is not None:
                gradient.data += each.before
            each.before, each.tensor = None, weakref.ref(tensor)
        self._found = [each for each in self._found if each.tensor() is not None]
