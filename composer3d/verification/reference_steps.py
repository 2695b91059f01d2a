"""Steps of one device as values: losses, gradients, parameters, and the effect of rounding on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.verification.evidence.gains import Gain

__all__ = ["Reference", "ReferenceStep"]


@dataclass(kw_only=True, eq=False)
class ReferenceStep:
    """One step on one device.

    Args:
        loss: Mean over the valid tokens of the global batch.
        grad_norm: Norm of the whole model's gradient.
        gradients: By FQN, as the backward leaves them.
        clipped: By FQN, as the optimizer sees them.
        parameters: By FQN, after the step.
        counts: Valid tokens of every micro-batch, in the order of data-parallel ranks.
        shares: Contribution of every micro-batch to the loss.
        averages: Moving averages by FQN, after the step; empty where the loop keeps none.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    clipped: dict[str, Tensor]
    parameters: dict[str, Tensor]
    counts: list[int]
    shares: list[float]
    averages: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Reference:
    """Steps on one device.

    Args:
        initial: Parameters before the first step, by FQN.
        replaced: A precision plugin trains other parameters than the model's (adapters).
        reduce_dtype: Dtype in which a run's ranks would reduce gradients; None where no plugin states one.
        steps: One after the other.
        samples: Losses of the first micro-batch at weights that are a little apart from the initial ones.
        rounding: How far this arithmetic is from float64 on the same weights, by what is compared and FQN (empty for
            numbers); in float64, how far rounding in another order comes, through the optimizer and the steps after it.
        unrepeatable: How far a second run of the first step is apart; 0 where that is rounding.
        gains: Of the first step's gradients, beside those of float64 on the same weights; empty in float64.
        buffers: Those that are saved, after the last step.
        kept: Those of them that the steps have changed, and what the loss keeps and has changed.
        untrained: Parameters to train that had no gradient.
    """

    initial: dict[str, Tensor]
    replaced: bool = False
    reduce_dtype: torch.dtype | None = None
    steps: list[ReferenceStep] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    rounding: dict[str, dict[str, float]] = field(default_factory=dict)
    unrepeatable: float = 0.0
    gains: dict[str, Gain] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
