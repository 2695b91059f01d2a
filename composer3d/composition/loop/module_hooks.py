"""Hooks on modules that are the model's own, or a loop's: what they keep of a forward is read when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModuleHooks"]


class ModuleHooks:
    """Says whether there are any, at any time: every step asks, so hooks are only looked at when their number changes.

    Args:
        modules: Of the parts of a run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables = forward_hooks.tables_of(modules)
        self._num, self._are_there = 0, False

    def __call__(self) -> bool:
        """Return it."""
        if (num := sum(map(len, self._tables))) != self._num:
            self._num, self._are_there = num, forward_hooks.are_there(self._tables)
        return self._are_there
