"""Gradients that a loop has used and dropped: its next backward starts from none, as on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from composer3d.step.gradients import local

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.step.loops.own_forward import OwnForward
    from composer3d.step.step_state import StepState

__all__ = ["DroppedGradients"]


class DroppedGradients:
    """Looks whether gradients that a backward has completed are still there.

    A loop that updates its parameters without `optimizer.step()` clears gradients by `p.grad = None` or zeros.
    """

    def __init__(self) -> None:
        self._versions: tuple[tuple[int, int, int], ...] = ()
        self._parameters: tuple[nn.Parameter, ...] = ()  # a forward that gathers them has others in their place

    def forget(self) -> None:
        """Begin a step, or a backward whose gradients are not complete."""
        self._versions, self._parameters = (), ()

    def complete(self, state: StepState) -> None:
        """Note the gradients that a last backward has left."""
        self._parameters = tuple(state.parameters())
        self._versions = _versions(_gradients(self._parameters))

    def are_gone(self, own: OwnForward | None, state: StepState | None) -> bool:
        """Return whether a backward had completed gradients, and all of them are now None or zeros.

        Only where something has written into gradients since are their values looked at.

        Args:
            own: The losses of the step; a target that was announced belongs to all of its backwards.
            state: The step, None outside of one.
        """
        if not self._versions or state is None or own is None or own.is_told:
            return False
        found = _gradients(self._parameters)
        if not found:
            return True
        return _versions(found) != self._versions and not any(bool(local(gradient).any()) for gradient in found)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _versions(found: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return version counters; a DTensor has its own, besides that of its local tensor."""
    pieces = [local(gradient.detach()) for gradient in found]
    return tuple((p.data_ptr(), p._version, gradient._version) for p, gradient in zip(pieces, found, strict=True))
