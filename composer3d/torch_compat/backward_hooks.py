"""Hooks on gradients of modules and of their calls, and autograd functions that are not torch's, in graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import BackwardHook

__all__ = ["follow_gradients", "is_operator_module", "legacy_gradient_hooks", "own_function", "wrap_gradient_hooks"]

# Of the attribute of a module whose calls are followed.
FOLLOWS = "composer3d_follows_gradients"
# Of that of a module whose hooks are wrapped.
WRAPS = "composer3d_wraps_gradient_hooks"


class _FollowedCall(Protocol):
    """Follower of one call of a module that has full backward hooks, for which torch replaces what it is given."""

    def given(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Take note of positional arguments, and of those in their place."""

    def returned(self, before: Any, after: Any) -> None:
        """Take note of what the module has returned, and of what is in its place."""

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a hook."""


def follow_gradients(module: nn.Module, call: Callable[[], _FollowedCall | None]) -> None:
    """Follow the calls of a module that has full backward hooks; torch has no public place for it (torch 2.11-2.15).

    Args:
        module: Whose calls.
        call: Called at each; None leaves it as it is.
    """
    from torch.nn.modules import module as modules

    vars(module)[FOLLOWS] = call
    vars(modules)["BackwardHook"] = _backward_hook


class _Wrap:
    """An attribute of a module that copies share, and that a file of the module leaves out."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self.wrap = wrap

    def __deepcopy__(self, memo: Any) -> _Wrap:
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


def wrap_gradient_hooks(module: nn.Module, wrap: Callable[[Any], Any]) -> None:
    """Wrap the full backward hooks that a module has when it is called; see `follow_gradients`.

    Args:
        module: Its own, not its children's.
        wrap: Given a hook as registered, or one before the backward; returns what is called in its place.
    """
    from torch.nn.modules import module as modules

    vars(module)[WRAPS] = _Wrap(wrap)
    vars(modules)["BackwardHook"] = _backward_hook


def _backward_hook(module: nn.Module, hooks: Sequence[Any], before: Sequence[Any]) -> BackwardHook:
    from torch.utils.hooks import BackwardHook

    if (wrap := vars(module).get(WRAPS)) is not None:
        hooks, before = [wrap.wrap(hook) for hook in hooks], [wrap.wrap(hook) for hook in before]
    follow = vars(module).get(FOLLOWS)
    call = None if follow is None else follow()
    if call is None:
        return BackwardHook(module, hooks, before)
    return _followed_kind()(module, [call.around(hook) for hook in hooks], [call.around(hook) for hook in before], call)


@functools.cache
def _followed_kind() -> Any:
    from torch.utils.hooks import BackwardHook

    class Followed(BackwardHook):
        def __init__(self, module: nn.Module, hooks: Any, before: Any, followed: _FollowedCall) -> None:
            super().__init__(module, hooks, before)
            self.followed = followed

        def setup_input_hook(self, args: tuple[Any, ...]) -> Any:
            given = super().setup_input_hook(args)
            self.followed.given(args, given)
            return given

        def setup_output_hook(self, args: Any) -> Any:
            returned = super().setup_output_hook(args)
            self.followed.returned(args, returned)
            return returned

    return Followed


def legacy_gradient_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Return what `register_backward_hook` has registered on a module; there is no public name (torch 2.11-2.15).

    Args:
        module: Its own, not its children's.
    """
    return module._backward_hooks if module._is_full_backward_hook is False else {}


def is_operator_module(name: str) -> bool:
    """Return whether a module of torch holds functions on tensors, as `torch.sgn` is; some are in private ones."""
    return name in ("torch", "torch.functional", "torch.nn.functional") or name.startswith("torch._C._")


def own_function(node: Any) -> type | None:
    """Return the `torch.autograd.Function` of a node of a graph; None for torch's operators.

    The node knows it by a private name alone (torch 2.11-2.15).
    """
    return getattr(node, "_forward_cls", None)
