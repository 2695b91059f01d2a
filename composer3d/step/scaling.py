"""Factors on the losses and gradients of a step: a loss scaler's, and the correction by the targets counted so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from composer3d.errors import StepError
from composer3d.interfaces import GradScaler
from composer3d.step import clipping

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.step.input_gradients import InputGradients

__all__ = ["Scaling"]


class Scaling:
    """Scales what backwards start from, and gradients by what later losses of the same step report.

    Attributes:
        scaler: A plugin's; None without one. A loop that runs its own backwards sets it aside.
        overflow: Whether this step's gradients cannot be used, by the scaler.
        applied: Factor that the gradients of this step have been multiplied with.
        inputs: Leaves among inputs, whose gradients are corrected as parameters' are.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self.overflow = False
        self.applied = 1.0
        self.inputs: InputGradients | None = None

    def begin(self) -> None:
        """Begin a step, whose gradients are not there yet."""
        if self.inputs is not None:
            self.inputs.forget()
        self.applied, self.overflow = 1.0, False

    def scale(self, loss: Tensor) -> Tensor:
        """Return the initial gradient of a backward, scaled like the gradients that it accumulates into."""
        loss = loss if self.applied == 1.0 else loss * self.applied
        return loss if self.scaler is None else self.scaler.scale(loss)

    def correct(self, parameters: Sequence[nn.Parameter], wanted: float) -> None:
        """Divide gradients by the count so far, as far as losses were not: code that reads them finds means.

        Args:
            parameters: This rank's.
            wanted: Factor that all of this step's gradients are to have.
        """
        if wanted != self.applied:
            given: Sequence[Tensor] = [] if self.inputs is None else self.inputs.of_step()
            clipping.scale_((*parameters, *given), wanted / self.applied)
            self.applied = wanted

    def unscale(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide final gradients by the loss scale, and record whether they overflowed."""
        if self.scaler is None:
            return
        if optimizer is None:
            raise StepError("a loss scaler needs run.optimizer(...) before the first step")
        self.overflow = self.scaler.unscale_(optimizer)

    def update(self, vetoes: Sequence[str]) -> None:
        """End a step: the scaler is updated by whether its veto held."""
        if self.scaler is not None:
            self.scaler.update("grad_scaler" in vetoes)
