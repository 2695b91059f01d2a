"""Evaluation: modules in evaluation mode, and the loss over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer3d import torch_compat
from composer3d.interfaces import Part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EvaluatedWeights", "Evaluation", "evaluating", "reshard_units"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss of a batch without gradients, over all ranks.

    Args:
        loss: The mean over valid tokens.
        count: Number of valid tokens.
    """

    loss: Tensor
    count: float


@dataclass(kw_only=True, eq=False)
class EvaluatedWeights:
    """Stash of what takes the place of weights while they are evaluated: `context.stash(EvaluatedWeights)`.

    Attributes:
        around: Contexts in which parameters hold other values; all ranks enter them.
    """

    around: list[Callable[[], contextlib.AbstractContextManager[None]]] = field(default_factory=list)
    _is_applied: bool = False

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enter all contexts once, for as many evaluations as happen inside."""
        if self._is_applied or not self.around:
            yield
            return
        self._is_applied = True
        try:
            with contextlib.ExitStack() as stack:
                for each in self.around:
                    stack.enter_context(each())
                yield
        finally:
            self._is_applied = False


@contextlib.contextmanager
def evaluating(parts: Sequence[Part]) -> Iterator[None]:
    """Set evaluation mode without gradients inside, and restore every module's own mode afterwards.

    Parameters that were gathered for a backward, which does not come, are resharded: otherwise a checkpoint would see
    no shards, and the next step would run on the gathered values, whatever has happened to the shards.
    """
    import torch

    modes = [(module, module.training) for part in parts for module in part.module.modules()]
    try:
        for part in parts:
            part.module.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        reshard_units(parts)


def reshard_units(parts: Sequence[Part], *, held: bool = True) -> None:
    """Reshard parameters that are kept gathered for a backward. Collectives: none.

    Args:
        parts: Of a rank.
        held: Those too that a graph which is still to be used has saved.
    """
    for part in parts:
        if held:
            torch_compat.release_units(part.module)
        for module in part.module.modules():
            reshard = getattr(module, "reshard", None)  # of FSDP2's modules
            if callable(reshard):
                reshard()
