"""The state of an open step, as step actions see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer3d.interfaces import Part

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["StepState"]


@dataclass(kw_only=True, eq=False)
class StepState:
    """State of an open step, passed to step actions.

    Attributes:
        step: The number that the loop gave.
        parts: This rank's stages.
        index: Index of the micro-batch within one batch; set from BEFORE_MICROBATCH on.
        is_last: Whether it is the last one before the gradients are used, as far as is known.
        forward_done: Whether the loop ran its own forward, before BEFORE_MICROBATCH.
        loss: That the loop's own backward starts from, where it ran its own forward.
        optimizer: None before it is made.
        metrics: Numbers to report with this step; actions may add some.
        vetoes: Names of the DECIDE actions that skipped the optimizer step on some rank.
        count: Valid tokens of the global batch so far; 1 a rank where the loop has announced no target.
        divided: Returns what such a loop's means were divided by; see `num_targets`.
    """

    step: int
    context: RunContext
    parts: tuple[Part, ...]
    index: int = 0
    is_last: bool = True
    forward_done: bool = False
    loss: Tensor | None = None
    optimizer: torch.optim.Optimizer | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    vetoes: tuple[str, ...] = ()
    count: int = 0
    divided: Callable[[], float | None] | None = None

    def num_targets(self) -> float | None:
        """Return how many valid targets the step's losses have, over all ranks of this model.

        Without an announced target it is what the means were divided by: valid targets, class weights, a mask. None
        where the losses do not say it. It waits for the device then.
        """
        return self.count if self.divided is None else self.divided()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return this rank's parameters, each once."""
        return {id(p): p for part in self.parts for p in part.module.parameters()}.values()
