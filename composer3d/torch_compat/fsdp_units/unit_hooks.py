"""Work of FSDP2's units in hooks around a forward, which modes of torch functions are not to see."""

from __future__ import annotations

from typing import Any

from composer3d.torch_compat.modes import hidden_from

__all__ = ["ModuleFunctions", "UnseenGathers"]

_Group: Any = object  # FSDP2's, whose module is not imported here


class ModuleFunctions:
    """Base of a mode of torch functions that is for a model's own functions, as of code that is propagated."""


class UnseenGathers(_Group):
    """A group whose gathering and freeing of parameters no `ModuleFunctions` sees.

    FSDP2 asks some twenty things of every parameter, each of which would reach such a mode. Other modes see them, as
    those of a verification do, which widen what FSDP2 casts. What it does to activations is every mode's to see. Groups
    are private (torch 2.11-2.15).
    """

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather."""
        with hidden_from(ModuleFunctions):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Take what was gathered."""
        with hidden_from(ModuleFunctions):
            super().wait_for_unshard()

    def reshard(self) -> None:
        """Free what was gathered."""
        with hidden_from(ModuleFunctions):
            super().reshard()
