"""Wrappers of plugins' functions and objects whose errors name the plugin."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from operator import length_hint
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

from composer3d.errors import ComposerError, HookError, describe_error, is_interrupt, is_of_raise
from composer3d.hooks.answers import Fault, fault_finder, mismatch, predicate_of, returned_by
from composer3d.initialisation.source_lines import is_torch, place_of_error
from composer3d.observation import lost_a_peer
from composer3d.transform import StepPoint

if TYPE_CHECKING:
    from composer3d.registry import Registered
    from composer3d.transform import StepAction

__all__ = [
    "BlamedAction",
    "CheckedHook",
    "HooksInTurn",
    "Returned",
    "Turn",
    "Turns",
    "blamed",
    "blamed_listing",
    "in_turn",
    "running",
]

# Names of those that run one after another, None where one is no plugin's, and an iterator that is as far as they are;
# see `running`.
Turn: TypeAlias = tuple[Sequence[str | None], Iterator[Any]]
# The turn in which plugins act now, by the thread's number: empty but while some plugin acts.
Turns: TypeAlias = dict[int, Turn]

_FROZEN = "; instances of plugins are frozen: what one remembers between steps is kept in context.state[self]"
_fits_veto = predicate_of(str | None)


def _are_nothing(values: Sequence[Any]) -> bool:
    """Return whether all results are None, which is valid of every hook and action."""
    return set(map(type, values)) == {type(None)}


def blamed(
    registered: Registered, name: str, function: Callable[..., Any], *, returns: Any = Any
) -> Callable[..., Any]:
    """Wrap a function of a plugin: its exceptions and invalid results become a `HookError`.

    A lost peer, exhausted memory and Ctrl-C are not the plugin's fault and are raised unchanged.

    Args:
        registered: Plugin of the function.
        name: Name of the function in messages.
        function: Function that a hook returned.
        returns: Type of the function's result.
    """

    fits = predicate_of(returns)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            if (found := _hook_error(error, registered, name)) is None:
                raise
            raise found from error
        if not fits(value):
            _refuse(registered, name, mismatch(value, returns))
        return value

    return call


class _Blamed:
    """A function of a plugin, called with one value, whose exceptions and invalid results become a `HookError`.

    A lost peer, exhausted memory and Ctrl-C are not the plugin's fault and are raised unchanged.

    Args:
        registered: Plugin of the function.
        name: Name of the function in messages.
        plain: The function without the handler.
        acting: Records the plugin while the function runs; None records nothing.
    """

    def __init__(
        self, registered: Registered, name: str, plain: Callable[[Any], Any], acting: Turns | None = None
    ) -> None:
        self.registered, self.plain, self.acting, self._name = registered, plain, acting, name
        self._in_turn = in_turn([self])

    def alone(self, given: Any) -> Any:
        """Call the function by itself."""
        [value] = self._in_turn(given)
        return value

    def refuse(self, value: Any, given: Any) -> None:
        """Raise where a result other than None is invalid."""
        raise NotImplementedError

    def error(self, error: BaseException) -> HookError | None:
        """Return the error to raise instead of the function's exception; None if that is raised unchanged."""
        return _hook_error(error, self.registered, self._name)


class BlamedAction(_Blamed):
    """The function of a plugin's step action, called with the step's state.

    Args:
        registered: Plugin of the action.
        action: The action as the plugin returned it.
        acting: Records the plugin while the action runs; None records nothing.
    """

    def __init__(self, registered: Registered, action: StepAction, acting: Turns | None = None) -> None:
        super().__init__(registered, f'the step action "{action.name}"', action.run, acting)
        self._decides = action.point is StepPoint.DECIDE

    def __call__(self, state: Any) -> str | None:
        """Run the action."""
        veto: str | None = self.alone(state)
        return veto

    def refuse(self, value: Any, given: Any) -> None:
        """Raise where a veto is neither text nor None."""
        if self._decides and not _fits_veto(value):
            _refuse(self.registered, self._name, mismatch(value, str | None))


class CheckedHook(_Blamed):
    """A hook implementation, called with the spec's arguments by name; its results are validated.

    Args:
        registered: Plugin of the implementation.
        hook: Name of the hook.
        function: Takes the spec's keyword arguments.
        acting: Records the plugin while it runs; None records nothing.
        copied: An argument, a mapping, of which the implementation has its own copy.
    """

    def __init__(
        self,
        registered: Registered,
        hook: str,
        function: Callable[..., Any],
        acting: Turns | None = None,
        copied: str | None = None,
    ) -> None:
        def plain(arguments: Mapping[str, Any]) -> Any:
            return function(**arguments)

        name = copied or ""

        def with_copy(arguments: Mapping[str, Any]) -> Any:
            return function(**{**arguments, name: dict(arguments[name])})

        super().__init__(registered, hook, with_copy if copied else plain, acting)
        self.hook, self.function, self._find_fault = hook, function, fault_finder(hook)

    def __call__(self, **arguments: Any) -> Any:
        """Call the implementation."""
        return self.alone(arguments)

    def refuse(self, value: Any, given: Mapping[str, Any]) -> None:
        """Raise where the hook's spec states another type of result."""
        if (fault := self._find_fault(value, given)) is not None:
            _refuse(self.registered, self._name, fault)


def in_turn(
    runs: Sequence[_Blamed | Callable[[Any], Any]],
    *,
    is_heard: bool = True,
    are_known: Callable[[Sequence[Any]], bool] = _are_nothing,
) -> Callable[[Any], Sequence[Any]]:
    """Return a function of one value, such as a step's state, that calls several, in order, and returns their results.

    Those of plugins are called as they are, inside one handler of exceptions, since steps run many of them.

    Args:
        runs: Functions of step actions, or hooks' arguments: `_Blamed` where they are a plugin's. All of these have one
            `acting`.
        is_heard: False where results mean nothing: they are neither validated nor returned.
        are_known: Whether all results are like some that were valid, and need not be validated.
    """
    if not runs:
        return _nothing
    owners = tuple(run if isinstance(run, _Blamed) else None for run in runs)
    plains = tuple(run.plain if isinstance(run, _Blamed) else run for run in runs)
    names = tuple(None if owner is None else owner.registered.name for owner in owners)
    acting = next((owner.acting for owner in owners if owner is not None), None)
    turns: Turns = {} if acting is None else acting

    def call(given: Any) -> Sequence[Any]:
        thread, turn = get_ident(), iter(plains)
        before = turns.get(thread)
        # Which one runs is read off the iterator, where it is asked: a loop of plain calls costs a third.
        turns[thread] = names, turn
        try:
            if not is_heard:
                for run in turn:
                    run(given)
                return ()
            values = [run(given) for run in turn]
            if not are_known(values):
                for owner, value in zip(owners, values, strict=True):
                    if value is not None and owner is not None:
                        owner.refuse(value, given)
        except BaseException as error:
            owner = owners[running(turn, len(owners))]
            if owner is None or (found := owner.error(error)) is None:
                raise
            raise found from error
        finally:
            if before is None:
                del turns[thread]
            else:
                turns[thread] = before
        return values

    return call


def running(turn: Iterator[Any], num: int) -> int:
    """Return the index of the item that an iterator over a tuple has returned last; it has returned one.

    Args:
        turn: The iterator.
        num: Length of the tuple.
    """
    return num - 1 - length_hint(turn)


class HooksInTurn:
    """All implementations of a hook, which is called in every step, inside one handler of exceptions.

    Args:
        hooks: In the order of calls.
        acting: Records the plugin of the running one; None records nothing.
        copied: An argument, a mapping, of which each implementation has its own copy.
        are_known: As for `in_turn`.

    Attributes:
        owners: Their plugins.
    """

    def __init__(
        self,
        hooks: Iterable[CheckedHook],
        acting: Turns | None,
        *,
        copied: str | None = None,
        are_known: Callable[[Sequence[Any]], bool] = _are_nothing,
    ) -> None:
        noted = [CheckedHook(each.registered, each.hook, each.function, acting, copied) for each in hooks]
        self.owners = tuple(each.registered for each in noted)
        self._in_turn = in_turn(noted, are_known=are_known)

    def __call__(self, **arguments: Any) -> Sequence[Any]:
        """Call all implementations; return their results, in the order of `owners`."""
        return self._in_turn(arguments)


def _nothing(given: Any) -> tuple[()]:
    """Do nothing: no action runs at a point, or no plugin implements a hook."""
    return ()


def blamed_listing(registered: Registered, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a plugin that returns names, from any iterable, as a tuple."""

    @functools.wraps(function)
    def listed(*args: Any) -> Any:
        value = function(*args)
        return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value

    return blamed(registered, name, listed, returns=Sequence[str] | None)


class Returned:
    """An object of a plugin: what its methods raise, or answer wrongly, names the plugin.

    Args:
        registered: Whose it is.
        hook: That returned it.
        protocol: Whose methods are called.
        instance: The object; attributes are its own.
    """

    def __init__(self, registered: Registered, hook: str, protocol: type, instance: Any) -> None:
        self._instance = instance
        for method, returns in returned_by(protocol).items():
            made = blamed(registered, f"{hook}'s {method}", getattr(instance, method), returns=returns)
            setattr(self, method, made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


def _refuse(registered: Registered, name: str, fault: Fault | None) -> None:
    if fault is not None:
        path = (registered.info.family, registered.name)
        message = f"{name} of {registered.name} returned {fault}"
        raise HookError(message, path=path, place=registered.place, is_own=True)


def _hook_error(error: BaseException, registered: Registered, name: str) -> HookError | None:
    """Return the error to raise instead of a plugin's exception; None if that is raised unchanged."""
    if isinstance(error, ComposerError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return None
    if is_interrupt(error) or lost_a_peer(error):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    innermost = frame.f_code.co_filename
    is_torchs = is_torch(innermost) or (isinstance(error, RuntimeError) and not is_of_raise(error))
    # State of a plugin may exist in runs alone.
    is_memory = isinstance(error, KeyError) and error.args[:1] == (registered.instance,)
    place = place_of_error(error).removesuffix(": ")
    is_frozen = isinstance(error, FrozenInstanceError) and frame.f_locals.get("self") is registered.instance
    return HookError(
        f"{name} of {registered.name} raised {describe_error(error)}, at {place}{_FROZEN if is_frozen else ''}",
        path=(registered.info.family, registered.name),
        place=registered.place,
        is_own=not is_torchs and not is_memory,
    )
