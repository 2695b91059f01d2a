"""Gradients that `retain_grad` keeps of activations, as one device has them: of all positions, and not scaled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    before: Tensor | None = None  # of earlier backwards, while one adds to it
    is_settled: bool = False  # whether `.grad` is one device's
    hook: Any = None

    def forget(self) -> None:
        """Put nothing aside any more."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class RetainedGradients:
    """Replaces what a backward leaves in `.grad` of activations.

    Code of a forward, or of a backward, reads the gradients of earlier backwards: these are put aside where a backward
    arrives at their tensor again, and not before.

    Memory: where a sequence is sharded, gradients of all its positions. Collectives: one all-gather of each there, and
    one all-reduce of each that every rank has whole.

    Args:
        inside: Knows which activations are shards.
        has_stages: Whether any number of forwards of a batch come before their backwards, as in a pipeline.
    """

    def __init__(self, inside: InsideValues, *, has_stages: bool) -> None:
        self._inside, self._has_stages = inside, has_stages
        self._found: list[_Retained] = []
        self._forward = self._num_begun = 0

    def count_forward(self) -> None:
        """Drop what has waited for a backward too long."""
        self._forward += not self._has_stages
        for each in self._found:
            if self._forward - each.forward >= _NUM_FORWARDS:
                each.forget()
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
        """Begin backwards, perhaps with forwards between them, that may add to gradients of earlier ones."""
        self._num_begun += 1
        for each in self._found:
            _expect(each)

    def settle(self, factor: float) -> None:
        """Make what a backward has left that of one device, which is `factor` times smaller."""
        for each in self._found:
            tensor = each.tensor()
            if tensor is None or each.is_settled or (gradient := tensor.grad) is None:
                continue
            # A shard's own size is another than the whole's, which torch compares when a gradient is assigned.
            gradient.data = each.whole(gradient) / factor
            if each.before is not None:
                gradient.data += each.before
            each.before, each.tensor = None, weakref.ref(tensor)
            _expect(each)

    def end(self) -> None:
        """End the backwards; where one has raised an error, what it has left is dropped."""
        self._num_begun -= 1
        for each in self._found:
            if not self._num_begun:
                each.forget()
            if each.before is not None and (tensor := each.tensor()) is not None:
                _assign(tensor, each.before)
                each.before, each.is_settled = None, True
        if self._has_stages and not self._num_begun:
            self._found.clear()  # with their graphs: no backward arrives there again
        self._found = [each for each in self._found if each.tensor() is not None]


def _expect(each: _Retained) -> None:
    """Have the gradient of an earlier backward put aside, to which torch would add one of another shape."""
    tensor = each.tensor()
    each.is_settled = tensor is not None and tensor.grad is not None
    if tensor is None or not each.is_settled or each.hook is not None or not tensor.requires_grad:
        return

    def arrives(_: Tensor) -> None:
        if each.is_settled and (known := each.tensor()) is not None:
            each.before, known.grad, each.is_settled = known.grad, None, False

    each.hook = tensor.register_hook(arrives)


def _assign(tensor: Tensor, gradient: Tensor) -> None:
    whole = gradient.data
    gradient.data = tensor.detach()
    tensor.grad = gradient
    gradient.data = whole
