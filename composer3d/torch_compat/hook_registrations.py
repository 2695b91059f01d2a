"""Hooks of modules that are called through a follower, which knows what activations the module is given and returns.

They are replaced where they are registered: a step in which a module has none costs nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from composer3d.torch_compat.forward_hooks import home_of, is_users_hook, tables_of, users_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FollowedHook", "HookKind", "are_followed", "follow_global_hooks", "follow_hooks"]

# Of the attribute of a module with its follower; copies of composed models leave such names out.
FOLLOWER = "_composer3d_hook_follower"

HookKind = Literal["before", "after", "gradients before", "gradients", "last gradients"]
# Tables of a module and their kinds, private (torch 2.11-2.15).
TABLES: dict[str, HookKind] = {
    "_forward_pre_hooks": "before",
    "_forward_hooks": "after",
    "_backward_pre_hooks": "gradients before",
    "_backward_hooks": "gradients",
}
# Methods that register.
METHODS: dict[str, HookKind] = {
    "register_forward_pre_hook": "before",
    "register_forward_hook": "after",
    "register_full_backward_pre_hook": "gradients before",
    "register_full_backward_hook": "gradients",
    "register_backward_hook": "last gradients",
}


class _Follower(Protocol):
    """Calls the hooks of one module."""

    def registered(self, module: nn.Module, hook: FollowedHook) -> None:
        """Take note that the module has one."""

    def call(self, module: nn.Module, hook: FollowedHook, given: tuple[Any, ...]) -> Any:
        """Call one with what torch gives it behind the module; return what torch is to have of it."""


class FollowedHook:
    """A hook that is called through the follower of whatever module it is called for, if that has one.

    Args:
        hook: As registered.
        kind: What it is called with: `last gradients` are those of the last function of a forward.
        takes_names: Whether it is given arguments by name, too.

    Attributes:
        own_hook: As registered; torch's wrappers take over attributes, and have one of the name `hook`.
    """

    def __init__(self, hook: Callable[..., Any], kind: HookKind, *, takes_names: bool) -> None:
        functools.update_wrapper(self, hook, updated=())
        self.__module__ = home_of(hook)
        self.own_hook, self.kind, self.takes_names = hook, kind, takes_names
        _made().append(kind)

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """Call it."""
        follower = _follower_of(module)
        return self.own_hook(module, *given) if follower is None else follower.call(module, self, given)


@functools.cache
def _made() -> list[HookKind]:
    """Return the kinds of hooks that were followed in this process."""
    return []


def are_followed(root: nn.Module) -> bool:
    """Return whether a module, or one inside of it, has hooks that are called through followers, or all modules do."""
    if not _made():
        return False
    hooks = itertools.chain.from_iterable(table.values() for table in tables_of(root.modules()))
    return any(isinstance(hook, FollowedHook) for hook in hooks)


def _follower_of(module: nn.Module) -> _Follower | None:
    found: _Follower | None = vars(module).get(FOLLOWER)
    return found


def follow_hooks(module: nn.Module, follower: _Follower) -> None:
    """Have hooks of a module that are no library's, and no plugin's, called through a follower.

    Args:
        module: Its hooks now, and those that are registered later.
        follower: Of this module.
    """
    _watch_methods()
    vars(module)[FOLLOWER] = follower
    is_last = module._is_full_backward_hook is False
    for name, kind in TABLES.items():
        names = getattr(module, f"{name}_with_kwargs", {})
        for table, key, hook in list(users_hooks(getattr(module, name), of=module)):
            followed = FollowedHook(
                hook, "last gradients" if is_last and kind == "gradients" else kind, takes_names=key in names
            )
            follower.registered(module, followed)
            table[key] = followed


def follow_global_hooks() -> bool:
    """Have hooks of all modules that are there called through followers of modules; return whether there are any."""
    from torch.nn.modules import module as home

    known: Any = vars(home)
    found = False
    for name, kind in TABLES.items():
        table: MutableMapping[int, Any] = known[f"_global{name}"]
        if not table:
            continue
        names = known.get(f"_global{name}_with_kwargs", {})
        for _, key, hook in list(users_hooks(table)):
            found = True
            if not isinstance(hook, FollowedHook):
                table[key] = FollowedHook(hook, kind, takes_names=key in names)
    return found


@functools.cache
def _watch_methods() -> None:
    """Replace the methods that register; torch has no public place for it."""
    import torch

    for name, kind in METHODS.items():
        setattr(torch.nn.Module, name, _registering(getattr(torch.nn.Module, name), kind))


def _registering(register: Callable[..., Any], kind: HookKind) -> Callable[..., Any]:
    @functools.wraps(register)
    def registering(self: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
        follower = _follower_of(self)
        if follower is not None and is_users_hook(hook) and not isinstance(hook, FollowedHook):
            hook = FollowedHook(hook, kind, takes_names=bool(kwargs.get("with_kwargs", False)))
            follower.registered(self, hook)
        return register(self, hook, *args, **kwargs)

    return registering
