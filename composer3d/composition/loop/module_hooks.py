"""Hooks on modules that are the model's own, or a loop's: what they keep of a forward is read when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Says whether there are any, or were: what one has kept is read when it is gone, too.

    Every step asks, so hooks are only looked at where one was registered since.

    Args:
        modules: Of the parts of a run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = forward_hooks.tables_of(modules)
        self._newest, self._were_there = -1, False

    def __call__(self) -> bool:
        """Return it."""
        if not self._were_there and (newest := forward_hooks.newest(self._tables)) != self._newest:
            self._newest, self._were_there = newest, forward_hooks.are_there(self._tables)
        return self._were_there
