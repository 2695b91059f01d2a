"""Hooks on modules that are the model's own, or a loop's: what they keep of a forward is read when it is done."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModuleHooks"]

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


class ModuleHooks:
    """Says whether there are any, at any time: every step asks, so hooks are only looked at when their number changes.

    The dictionaries of modules are private (torch 2.11-2.15).

    Args:
        modules: Of the parts of a run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        from torch.nn.modules import module as home

        self._kinds: list[dict[int, Any]] = [vars(home)[kind] for kind in _GLOBAL]
        self._kinds += [getattr(module, kind) for module in modules for kind in _KINDS]
        self._num, self._are_there = 0, False

    def __call__(self) -> bool:
        """Return it."""
        num = sum(map(len, self._kinds))
        if num != self._num:
            self._num = num
            self._are_there = any(not _is_library(hook) for kind in self._kinds for hook in kind.values())
        return self._are_there


def _is_library(hook: Any) -> bool:
    """Return whether a hook is torch's or this package's; those of `torch.nn.utils` change weights."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = str(getattr(hook, "__module__", None) or type(hook).__module__)
    return home.startswith(("torch.", "composer3d"))  # plugins of this package too
