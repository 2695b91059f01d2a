"""Steps that a loop does not open itself: its first forward or backward opens one, the optimizer's step closes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from composer3d.errors import StepError
from composer3d.step.losses.batch_parts import BatchParts
from composer3d.step.microbatches import first_tensor
from composer3d.step.step_state import StepState

__all__ = ["OwnSteps", "refuse_incomplete"]


class OwnSteps:
    """Opens and closes steps for a loop that only calls the optimizer's step.

    Attributes:
        next: Number of the next step; continues after steps that the loop numbered, and after a load.
        num_backwards: Number of backwards in the open step.
        num_samples: Number of samples in the forward without a backward yet; 0 if unknown.
        parts: Forwards that were given parts of one batch.

    Args:
        step: Returns the context manager of a step, given its number.
    """

    def __init__(self, step: Callable[[int], contextlib.AbstractContextManager[StepState]]) -> None:
        self.next = self.num_backwards = self.num_samples = 0
        self.parts = BatchParts()
        self._has_opened = False
        self._step = step
        self._open: contextlib.ExitStack | None = None

    @property
    def is_open(self) -> bool:
        """Whether an implicit step is open, which the loop has not opened itself."""
        return self._open is not None

    def open(self) -> StepState:
        """Open the next step."""
        with contextlib.ExitStack() as stack:
            state = stack.enter_context(self._step(self.next))
            self._open = stack.pop_all()
        self._has_opened = True
        return state

    def forget(self) -> None:
        """Forget the backwards of the step."""
        self.num_backwards = 0
        self.parts.clear()

    def outside(self, call: str) -> StepError:
        """Return the error of a call that needs a step, where none is open."""
        if not self._has_opened:
            return StepError(f"{call} was called outside a step; write: with run.step(n): ...")
        return StepError(
            f"{call} was called without gradients: no forward and backward has run since the optimizer's last step; "
            "call it once after the backwards of a batch"
        )

    def count_forward(self, given: Any) -> None:
        """Record the samples of a forward, and whether they are a part of a tensor's rows.

        Args:
            given: Arguments of the model.
        """
        first = first_tensor(given)
        self.num_samples = 0 if first is None else first.shape[0]
        if first is not None:
            self.parts.add_forward(first)

    def count_backward(self) -> int:
        """Count a backward; return the samples of its forward, 0 where it has had a backward before."""
        self.num_backwards += 1
        self.parts.end_backward()
        found, self.num_samples = self.num_samples, 0
        return found

    def close(self) -> None:
        """Close the step, if one is open."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

    def drop_gradients(self) -> None:
        """Give up the step whose gradients the loop clears, if it has not opened the step itself."""
        if self.num_backwards:
            self.abandon()

    def abandon(self) -> None:
        """Discard the step, if one is open, as if it had not begun."""
        stack, self._open = self._open, None
        if stack is not None:
            self.next -= 1
            given_up = StepError("the step was given up")
            with contextlib.suppress(StepError):
                stack.__exit__(StepError, given_up, None)


def refuse_incomplete(call: str, *, step: int, is_pending: bool, is_foreign: bool) -> None:
    """Raise where gradients are used that are not complete.

    Args:
        call: What uses them.
        step: Its number.
        is_pending: Whether no backward was the last one.
        is_foreign: Whether the loop ran backwards without the composition.
    """
    if is_pending:
        raise StepError(
            f"{call} was called, and no backward of this step was the last one; "
            "call run.backward(loss, last=True) for the last loss of a step"
        )
    if is_foreign:
        raise StepError(
            f"{call} was called, and no backward of step {step} was the composition's, which normalises "
            "gradients over all ranks; write run.backward(loss) instead of loss.backward(); gradients that the loop "
            "puts together itself start from p.grad of run.backward(loss) too: clone them, and write into p.grad"
        )
