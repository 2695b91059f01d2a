"""Copies of a run's state that are made during a forward and backward, for which the optimizer's step waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from composer3d.checkpoint import Staging
    from composer3d.composition.assembling import Assembled

__all__ = ["DeferredCopies"]


class DeferredCopies:
    """Memory of copies that may not be complete yet; the engine settles them before anything is written to.

    Args:
        assembled: Whose step engine is given `settle`.
    """

    def __init__(self, assembled: Assembled) -> None:
        self._assembled = assembled
        self._stagings: list[Staging] = []
        assembled.engine.settle = self.settle

    def add(self, staging: Staging) -> Staging:
        """Add memory of copies, if it is not here, and return it."""
        if staging not in self._stagings:
            self._stagings.append(staging)
        return staging

    def settle(self) -> None:
        """Return when parameters and the optimizer's state may be written to."""
        for staging in self._stagings:
            staging.settle()

    def steady(self, keys: Iterable[str], optimizer: torch.optim.Optimizer | None) -> set[str]:
        """Return the keys of tensors that nothing but the optimizer's step writes to.

        Args:
            keys: As in checkpoints.
            optimizer: Of the loop; what keeps its state in another form than plain tensors makes these for the save.
        """
        if self._assembled.engine.stepper is not None:
            return set()  # it steps in the backward
        context = self._assembled.context
        first = {fqn: group[0] for group in context.ties for fqn in group}
        named = (fqn for part in context.parts for fqn, _ in part.module.named_parameters())
        parameters = {f"model/{first.get(fqn, fqn)}" for fqn in named}
        keeps_plain = not hasattr(optimizer, "plain_state")
        return {key for key in keys if key in parameters or (keeps_plain and key.startswith("optimizer/"))}
