"""Work of FSDP2's units in hooks around a forward, which modes of torch functions are not to see."""

from __future__ import annotations

from typing import Any

from composer3d.torch_compat.captured_graphs import outside_function_modes

__all__ = ["UnseenGathers"]

_Group: Any = object  # FSDP2's, whose module is not imported here


class UnseenGathers(_Group):
    """A group of which no mode of torch functions sees how parameters are gathered, and freed again.

    A mode around a model's forward, as of code that is propagated, is for the model's functions: FSDP2 asks some twenty
    things of every parameter, each of which would reach it. What it does to activations is the mode's to see. Groups
    are private (torch 2.11-2.15).
    """

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather."""
        with outside_function_modes():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Take what was gathered."""
        with outside_function_modes():
            super().wait_for_unshard()

    def reshard(self) -> None:
        """Free what was gathered."""
        with outside_function_modes():
            super().reshard()
