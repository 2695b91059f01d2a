"""Hooks on gradients of modules and of their calls, and autograd functions that are not torch's, in graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from composer3d.torch_compat.forward_hooks import LIBRARIES, home_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import BackwardHook

__all__ = [
    "SharedHook",
    "WatchedRegistrations",
    "accumulated_leaf",
    "follow_gradients",
    "is_operator_module",
    "is_users",
    "legacy_gradient_hooks",
    "node_hooks",
    "num_legacy_registrations",
    "own_function",
    "shared_hook",
    "stand_for",
    "stood_for",
    "wrap_gradient_hooks",
]

# Of the attribute of a module whose calls are followed.
FOLLOWS = "composer3d_follows_gradients"
# Of that of a tensor that a module is given in place of another.
STANDS = "composer3d_stands_for"
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


def accumulated_leaf() -> Tensor | None:
    """Return the leaf whose gradient a backward accumulates, where the hook that asks is one on the node that does.

    There is no public name (torch 2.11-2.15).
    """
    import torch

    leaf: Tensor | None = getattr(torch._C._current_autograd_node(), "variable", None)
    return leaf


def is_operator_module(name: str) -> bool:
    """Return whether a module of torch holds functions on tensors, as `torch.sgn` is; some are in private ones."""
    return name in ("torch", "torch.functional", "torch.nn.functional") or name.startswith("torch._C._")


def is_users(hook: Any) -> bool:
    """Return whether a hook on a gradient is no library's, and none that torch makes of a module's.

    Operators and functions of torch (`torch.sgn`, `functional.normalize`) are what a model does with its gradient.
    """
    if (shared := shared_hook(hook)) is not None:
        hook = shared.function
    if isinstance(hook, functools.partial) and any(hasattr(each, "_is_full_backward_hook") for each in hook.args):
        return False
    home = home_of(hook)
    return is_operator_module(home) or not f"{home}.".startswith(LIBRARIES)


def node_hooks(node: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks before a node of a graph, and those behind it; torch has no public name (torch 2.11-2.15)."""
    handles = [register(_nothing) for register in (node.register_prehook, node.register_hook)]
    tables = [list(handle.hooks_dict_ref().values()) for handle in handles]
    for handle in handles:
        handle.remove()
    ahead, behind = ([hook for hook in table if hook is not _nothing] for table in tables)
    return ahead, behind


def own_function(node: Any) -> type | None:
    """Return the `torch.autograd.Function` of a node of a graph; None for torch's operators.

    The node knows it by a private name alone (torch 2.11-2.15).
    """
    return getattr(node, "_forward_cls", None)


@dataclass(frozen=True, kw_only=True)
class SharedHook:
    """The part that one tensor has in a hook which `torch.autograd.graph.register_multi_grad_hook` gives several.

    Attributes:
        key: Of all tensors that share it.
        function: As given.
        place: Of the tensor, among all; None of one that is called with the first gradient alone.
        num: Of tensors.
        leaves: Those that are leaves.
        num_calls: Returns how many backwards have called the function of the first gradient.
    """

    key: Any
    function: Callable[..., Any]
    place: int | None
    num: int
    leaves: tuple[Tensor, ...]
    num_calls: Callable[[], int]


def shared_hook(hook: Any) -> SharedHook | None:
    """Return what a hook shares with those of other tensors; None of one that is a tensor's own.

    The hook is a closure of torch's, whose names are private (torch 2.11-2.15).
    """
    code = getattr(hook, "__code__", None)
    if code is None or not code.co_qualname.startswith("register_multi_grad_hook.<locals>."):
        return None
    names = {name: cell.cell_contents for name, cell in zip(code.co_freevars, hook.__closure__, strict=True)}
    found = [getattr(node, "variable", None) for node in names.get("grad_fns", ())]
    return SharedHook(
        key=names["lock"],
        function=names["fn"],
        place=names.get("idx"),
        num=len(found),
        leaves=tuple(leaf for leaf in found if leaf is not None),
        num_calls=lambda: len(names["ran_hook"]),
    )


class WatchedRegistrations:
    """A context in which hooks that code registers on tensors, and on nodes of their graph, are replaced, and retained
    gradients noted, at no cost of other functions; the innermost is asked, and it may be left in any order.

    Args:
        hooked: Given a tensor and a hook, returns the hook that is registered in its place.
        retained: Called with a tensor whose gradient is to be retained.
        of_node: Given a hook on a node, or one before it, returns likewise; nobody knows the node before it runs.
    """

    def __init__(
        self,
        hooked: Callable[[Tensor, Any], Any],
        retained: Callable[[Tensor], None],
        of_node: Callable[[Any], Any] = lambda hook: hook,
    ) -> None:
        self.hooked, self.retained, self.of_node = hooked, retained, of_node

    def __enter__(self) -> WatchedRegistrations:
        _registrations().watching.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        watching = _registrations().watching
        if self in watching:
            watching.remove(self)


def num_legacy_registrations() -> int:
    """Return how often `register_backward_hook` was called on modules since the first watch of registrations."""
    return _registrations().num_legacy


def stand_for(other: Tensor, tensor: Tensor) -> Tensor:
    """Have hooks that watched code registers on what a module is given registered on what the model's code has there.

    Args:
        other: Given in its place, such as a part of it, or in another form.
        tensor: Of the model's code.

    Returns:
        The former.
    """
    if other is not tensor:
        setattr(other, STANDS, tensor)
    return other


def stood_for(other: Tensor) -> Tensor | None:
    """Return the tensor of the model's code in whose place another was given; None where it is none such."""
    found: Tensor | None = vars(other).get(STANDS)
    return found


class _Registrations(threading.local):
    """Contexts at work in a thread, as modes of torch functions are."""

    def __init__(self) -> None:
        self.watching: list[WatchedRegistrations] = []
        self.num_legacy = 0


@functools.cache
def _registrations() -> _Registrations:
    """Replace the methods that register; torch tells nobody but modes, which every function goes through."""
    import torch
    from torch.autograd.function import _HookMixin

    found = _Registrations()
    register, retain = torch.Tensor.register_hook, torch.Tensor.retain_grad
    register_legacy, register_of_node = torch.nn.Module.register_backward_hook, _HookMixin._register_hook

    @functools.wraps(register)
    def register_hook(self: Tensor, hook: Any) -> Any:
        if not found.watching:
            return register(self, hook)
        tensor = vars(self).get(STANDS, self)
        return register(tensor, found.watching[-1].hooked(tensor, hook))

    @functools.wraps(retain)
    def retain_grad(self: Tensor) -> None:
        if found.watching:
            found.watching[-1].retained(self)
        retain(self)

    @functools.wraps(register_legacy)
    def register_backward_hook(self: nn.Module, hook: Any) -> Any:
        found.num_legacy += 1
        return register_legacy(self, hook)

    @functools.wraps(register_of_node)
    def register_on_node(table: Any, hook: Any) -> Any:
        return register_of_node(table, found.watching[-1].of_node(hook) if found.watching else hook)

    # Both methods of every node, of torch's operators too, end here (torch 2.11-2.15).
    _HookMixin._register_hook = staticmethod(register_on_node)  # type: ignore[method-assign]
    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    torch.Tensor.retain_grad = retain_grad  # type: ignore[assignment, method-assign]
    torch.nn.Module.register_backward_hook = register_backward_hook  # type: ignore[method-assign]
    return found
