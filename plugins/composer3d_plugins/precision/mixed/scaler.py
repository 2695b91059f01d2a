"""Loss scaling: a static scale, or the largest one that does not overflow, found by trial."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import StepError, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SMALLEST", "LossScaler"]

SMALLEST = 2.0**-24  # of float16's numbers: scaled by less, no loss of ordinary size has a gradient


class LossScaler:
    """Multiply losses so that small gradients survive float16; the core agrees with all ranks on what overflowed.

    torch's own GradScaler asks only the mesh of each parameter: ranks with other parameters, as stages of a pipeline
    are, would keep other scales without an error. Here a rank only reports what it found.

    Args:
        scale: Initial factor of the loss.
        growth: Factor of the scale after `interval` steps in a row without overflow.
        backoff: Factor of the scale after a skipped step, below 1.
        interval: Steps without overflow before the scale grows.
        hysteresis: Overflows before the scale falls, counted from its last growth (Megatron-LM, DeepSpeed).
        is_restored_by_steps: Whether every step without overflow, too, begins that count anew.
        smallest: Scale at which another overflow is an error.
        is_static: Whether the scale never changes.
    """

    # A run in float16 may resume in bfloat16, and the other way round: the scale is found by trial.
    is_dispensable = True

    def __init__(
        self,
        *,
        scale: float,
        growth: float,
        backoff: float,
        interval: int,
        hysteresis: int = 1,
        is_restored_by_steps: bool = False,
        smallest: float = SMALLEST,
        is_static: bool = False,
    ) -> None:
        self.factor, self.num_good, self.num_overflows, self.num_tolerated = scale, 0, 0, hysteresis - 1
        self._growth, self._backoff, self._interval, self._smallest = growth, backoff, interval, smallest
        self._hysteresis, self._is_restored_by_steps, self._is_static = hysteresis, is_restored_by_steps, is_static

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply in float32: a float16 loss times the scale would overflow by itself."""
        return (loss.float() if loss.dtype.itemsize < 4 else loss) * self.factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide this rank's gradients by the scale; return whether one of them was not finite.

        Memory: a number a gradient. Collectives: none; the core reduces the votes of all ranks.
        """
        import torch

        grads: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = torch_compat.local_of(parameter.grad)
                    if local.numel():
                        grads[local.dtype, local.device].append(local)
        finite = True
        for tensors in grads.values():
            torch_compat.foreach_mul_(tensors, 1.0 / self.factor)
            # The largest element of each: infinite or NaN if any element is.
            finite &= bool(torch.stack(torch_compat.foreach_norm(tensors, float("inf"))).isfinite().all())
        return not finite

    def update(self, skipped: bool) -> None:
        """Adapt after a step that was, or was not, skipped on all ranks, for whatever reason.

        Raises:
            StepError: The scale is as small as it can be, and steps still overflow; on all ranks alike.
        """
        self.num_good = 0 if skipped else self.num_good + 1
        self.num_overflows += skipped
        if self._is_static:
            return
        if skipped and self.num_tolerated:
            self.num_tolerated -= 1
        elif skipped:
            self._fall()
        elif self.num_good == self._interval:
            self.factor *= self._growth
            self.num_good, self.num_tolerated = 0, self._hysteresis - 1
        elif self._is_restored_by_steps:
            self.num_tolerated = self._hysteresis - 1

    def _fall(self) -> None:
        if self.factor <= self._smallest:
            raise StepError(
                f"float16 overflows at any loss scale: after {self.num_overflows} skipped steps it would be "
                f"{self.factor * self._backoff:g}; what overflows lies in the model's own values; write param_dtype = "
                '"bfloat16", or lower optimizer.lr'
            )
        self.factor = max(self.factor * self._backoff, self._smallest)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the scale and its counters, from which a resumed run continues."""
        counts = {"num_good": self.num_good, "num_overflows": self.num_overflows, "num_tolerated": self.num_tolerated}
        return {"scale": self.factor, **counts}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the scale and its counters; a static scale is the manifest's."""
        self.factor = self.factor if self._is_static else float(state["scale"])
        self.num_good, self.num_overflows = int(state["num_good"]), int(state["num_overflows"])
        self.num_tolerated = min(int(state.get("num_tolerated", 0)), self._hysteresis - 1)
