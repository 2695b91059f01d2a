"""An exponential moving average of the weights, kept in shards beside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["EMA"]


class EMA:
    """An exponential moving average of the parameters that are trained: average = d average + (1 - d) weight.

    Parameters narrower than float32 are averaged in float32: in bfloat16, one minus a usual decay is lost in rounding.
    Each average has the layout of its parameter, so it is saved in shards and loads in another layout.
    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.

    Args:
        run: The composition, before its first step.
        decay: What is left of the average after an update.
        every: Steps between two updates.

    Memory: one more copy of this rank's shards, two while the averages are applied. Collectives: none.
    """

    def __init__(self, run: Composition, *, decay: float, every: int = 1) -> None:
        self._decay, self._every = decay, every
        self._run = run
        self._averages = {
            fqn: _widened(parameter.detach()) for fqn, parameter in run.named_parameters() if parameter.requires_grad
        }

    def update(self, step: int) -> None:
        """Take the weights in after the optimizer's step number `step`, counted from 0."""
        if (step + 1) % self._every:
            return
        averages, weights = self._locals()
        if averages:
            weights = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
            torch_compat.foreach_lerp_(averages, weights, 1.0 - self._decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Train nothing inside: the parameters hold the averages, and get their own values back after."""
        import torch

        averages, weights = self._locals()
        with torch.no_grad():
            own = [weight.clone() for weight in weights]
            for weight, average in zip(weights, averages, strict=True):
                weight.copy_(average)
            try:
                yield
            finally:
                for weight, value in zip(weights, own, strict=True):
                    weight.copy_(value)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the averages by FQN."""
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the averages back."""
        for fqn, average in self._averages.items():
            saved = state["averages"][fqn]
            if saved is not average:
                average.copy_(saved)

    def _locals(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's shards of averages and weights, without the empty ones."""
        weights = dict(self._run.named_parameters())
        local = torch_compat.local_of
        pairs = [(local(average), local(weights[fqn].detach())) for fqn, average in self._averages.items()]
        pairs = [(average, weight) for average, weight in pairs if weight.numel()]
        return [average for average, _ in pairs], [weight for _, weight in pairs]


def _widened(tensor: Tensor) -> Tensor:
    import torch

    return tensor.to(torch.float32, copy=True) if tensor.dtype.itemsize < 4 else tensor.clone()
