"""Steps that must not be taken: a loss or gradient that is not finite, or a loss far above those before it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError
from composer3d.registry import Catalogue

if TYPE_CHECKING:
    from composer3d.runner.runner_tables import StabilityTable

__all__ = ["Stability", "StabilityError"]

_NO_TARGETS = "no target of the global batch is valid (every one is -100), so there is no loss"
_GO_BACK = "go on from an earlier checkpoint (--resume PATH) with a lower optimizer.lr"


def _against_overflow(loss: float) -> str:
    tables = Catalogue.installed().offering("compute_dtype", "bfloat16") or "a plugin"
    if not math.isfinite(loss):
        return (
            "the loss is not finite, so float16 overflows in the model's own values, at any loss scale; compute in "
            f"bfloat16, as {tables} does by default, or lower optimizer.lr"
        )
    return (
        "the loss is finite, and its gradients overflow float16 at the loss scales of these steps: begin with a lower "
        "scale, or raise stability.max_skips and let the scaler come to one; where they overflow at any, compute in "
        f"bfloat16, as {tables} does by default"
    )


class StabilityError(ComposerError):
    """The loss or the gradient went out of bounds, and `on_nonfinite` is `stop`, or too many steps were skipped."""

    def __init__(self, message: str, *, step: int, loss: float, grad_norm: float) -> None:
        self.step, self.loss, self.grad_norm = step, loss, grad_norm
        super().__init__(message)


class Stability:
    """Judges steps by their loss and gradient norm.

    Both numbers are those of the global batch and the full model, the same on every rank, so every rank judges alike
    and nothing has to be agreed.

    Args:
        table: `[stability]`.
        overflow_is_expected: A loss scaler finds gradients that are not finite by itself, and skips them.

    Memory: `spike_window` numbers. Collectives: none.
    """

    def __init__(self, table: StabilityTable, *, overflow_is_expected: bool = False) -> None:
        self._table, self._overflow_is_expected = table, overflow_is_expected
        self._losses: deque[float] = deque(maxlen=table.spike_window)
        self._in_a_row = 0
        self.num_skipped = 0
        self._any_taken = False
        self._last = math.nan, math.nan

    def judge(self, step: int, *, loss: float, grad_norm: float, count: int = 1) -> str | None:
        """Return why a step must be skipped, None if it may be taken.

        Args:
            step: Optimizer steps done with this one.
            loss: Of the global batch.
            grad_norm: Of the full model, before clipping.
            count: Valid targets of the global batch.

        Raises:
            StabilityError: The manifest says to stop, or too many steps in a row were skipped.
        """
        reason = self._objection(loss, grad_norm) if count or math.isfinite(loss) else _NO_TARGETS
        if reason is None:
            self._losses.append(loss)
            return None
        figures = f"step {step}: {reason} (loss {loss:.6g}, gradient norm {grad_norm:.6g})"
        if self._table.on_nonfinite == "stop":
            cure = "lower optimizer.lr or train.grad_clip" if reason != _NO_TARGETS else "mend the data"
            raise StabilityError(
                f'{figures}; {cure}, or set stability.on_nonfinite = "skip" to leave such steps out',
                step=step,
                loss=loss,
                grad_norm=grad_norm,
            )
        self._count(figures, _GO_BACK, step=step, loss=loss, grad_norm=grad_norm)
        return figures

    def taken(self) -> None:
        """Note that the optimizer has taken the step that was judged."""
        self._in_a_row = 0
        self._any_taken = True

    def vetoed(self, step: int, *, by: Collection[str], loss: float, grad_norm: float) -> None:
        """Count a step that plugins skipped, a loss scaler that found an overflow for one.

        Args:
            step: As for `judge`, and so are `loss` and `grad_norm`.
            by: Who skipped it.

        Raises:
            StabilityError: Too many steps in a row were skipped.
        """
        figures = f"step {step}: skipped by {', '.join(by)} (loss {loss:.6g}, gradient norm {grad_norm:.6g})"
        advice = _against_overflow(loss) if "grad_scaler" in by else _GO_BACK
        self._count(figures, advice, step=step, loss=loss, grad_norm=grad_norm)

    def finish(self, step: int) -> None:
        """Refuse a run that ends without a step that was taken: what it would save is what it began with.

        Args:
            step: Optimizer steps done.

        Raises:
            StabilityError: Every step was skipped.
        """
        if self.num_skipped and not self._any_taken:
            raise StabilityError(
                f"all {step} steps were skipped, so nothing is trained; see skipped_steps in metrics.jsonl, and lower "
                "optimizer.lr, or compute in bfloat16 where float16 overflows",
                step=step,
                loss=self._last[0],
                grad_norm=self._last[1],
            )

    def _count(self, figures: str, advice: str, *, step: int, loss: float, grad_norm: float) -> None:
        self.num_skipped += 1
        self._in_a_row += 1
        self._last = loss, grad_norm
        if self._in_a_row >= self._table.max_skips:
            raise StabilityError(
                f"{figures}: step {self._in_a_row} in a row that was skipped (stability.max_skips = "
                f"{self._table.max_skips}); {advice}",
                step=step,
                loss=loss,
                grad_norm=grad_norm,
            )

    def _objection(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not math.isfinite(grad_norm) and not self._overflow_is_expected:
            return "the gradient is not finite"
        factor = self._table.spike_factor
        if factor is not None and len(self._losses) == self._table.spike_window:
            usual = statistics.median(self._losses)
            if loss > factor * usual:
                return f"the loss is above {factor:g} times {usual:.6g}, the median of the last {len(self._losses)}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that spikes are measured against, and the counts."""
        return {
            "losses": list(self._losses),
            "in_a_row": self._in_a_row,
            "num_skipped": self.num_skipped,
            "any_taken": self._any_taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._in_a_row, self.num_skipped = int(state["in_a_row"]), int(state["num_skipped"])
        self._any_taken = bool(state.get("any_taken", True))  # checkpoints of before say nothing
