"""Wrappers of plugins' functions and objects whose errors name the plugin."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer3d.errors import ComposerError, HookError, describe_error, is_interrupt, is_of_raise
from composer3d.hooks.answers import Fault, fault_finder, mismatch, predicate_of, returned_by
from composer3d.initialisation.source_lines import is_torch, place_of_error
from composer3d.observation import lost_a_peer
from composer3d.transform import StepPoint

if TYPE_CHECKING:
    from composer3d.registry import Registered
    from composer3d.transform import StepAction

__all__ = ["Acting", "BlamedAction", "Returned", "blamed", "blamed_listing", "checked", "in_turn"]

_fits_veto = predicate_of(str | None)


def checked(registered: Registered, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook implementation: its exceptions and invalid results become a `HookError`.

    A lost peer, exhausted memory and Ctrl-C are not the plugin's fault and are raised unchanged.
    """

    find_fault = fault_finder(hook)

    @functools.wraps(function)
    def answer(**arguments: Any) -> Any:
        try:
            value = function(**arguments)
        except BaseException as error:
            if (found := _hook_error(error, registered, hook)) is None:
                raise
            raise found from error
        if value is not None and (fault := find_fault(value, arguments)) is not None:
            _refuse(registered, hook, fault)
        return value

    return answer


def blamed(
    registered: Registered, name: str, function: Callable[..., Any], *, returns: Any = Any
) -> Callable[..., Any]:
    """Wrap a function of a plugin as `checked` does.

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


class BlamedAction:
    """The function of a plugin's step action: exceptions and invalid vetoes become a `HookError`, as in `blamed`.

    Args:
        registered: Plugin of the action.
        action: The action as the plugin returned it.
        acting: Records the plugin while the action runs; None records nothing.
    """

    def __init__(self, registered: Registered, action: StepAction, acting: Acting | None = None) -> None:
        self.registered, self.plain, self.acting = registered, action.run, acting
        self._name, self._decides = f'the step action "{action.name}"', action.point is StepPoint.DECIDE
        self._in_turn = in_turn([self])

    def __call__(self, state: Any) -> str | None:
        """Run the action alone."""
        [value] = self._in_turn(state)
        return value

    def refuse(self, value: Any) -> None:
        """Raise where a veto is neither text nor None."""
        if self._decides and not _fits_veto(value):
            _refuse(self.registered, self._name, mismatch(value, str | None))

    def error(self, error: BaseException) -> HookError | None:
        """Return the error to raise instead of the action's exception; None if that is raised unchanged."""
        return _hook_error(error, self.registered, self._name)


def in_turn(runs: Sequence[Callable[[Any], str | None]]) -> Callable[[Any], Sequence[str | None]]:
    """Return a function of a step's state that calls several, in order, and returns their results.

    Those of plugins are called as they are, inside one handler of exceptions, since steps run many of them.

    Args:
        runs: Functions of step actions: `BlamedAction` where they are a plugin's. All of these have one `acting`.
    """
    if not runs:
        return _nothing
    calls = [
        (run.registered.name, run.plain, run) if isinstance(run, BlamedAction) else (None, run, None) for run in runs
    ]
    acting = next((owned.acting for *_, owned in calls if owned is not None), None)
    unnoted: dict[str, Any] = {"plugin": None}

    def call(state: Any) -> Sequence[str | None]:
        own = unnoted if acting is None else vars(acting)  # this thread's, looked up once
        before, values, owned = own["plugin"], [], None
        try:
            for plugin, run, owned in calls:
                own["plugin"] = plugin
                value = run(state)
                values.append(value)
                if value is not None and owned is not None:
                    owned.refuse(value)
        except BaseException as error:
            if owned is None or (found := owned.error(error)) is None:
                raise
            raise found from error
        finally:
            own["plugin"] = before
        return values

    return call


def _nothing(state: Any) -> tuple[()]:
    """Do nothing: no action runs at a point."""
    return ()


def blamed_listing(registered: Registered, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a plugin that returns names, from any iterable, as a tuple."""

    @functools.wraps(function)
    def listed(*args: Any) -> Any:
        value = function(*args)
        return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value

    return blamed(registered, name, listed, returns=Sequence[str] | None)


class Acting(Protocol):
    """The plugin that acts now: an object with a dictionary of its own for each thread, as `threading.local` has.

    Attributes:
        plugin: Its name; None while none acts.
    """

    plugin: str | None


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
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    is_torchs = is_torch(innermost) or (isinstance(error, RuntimeError) and not is_of_raise(error))
    # State of a plugin may exist in runs alone.
    is_memory = isinstance(error, KeyError) and error.args[:1] == (registered.instance,)
    place = place_of_error(error).removesuffix(": ")
    return HookError(
        f"{name} of {registered.name} raised {describe_error(error)}, at {place}",
        path=(registered.info.family, registered.name),
        place=registered.place,
        is_own=not is_torchs and not is_memory,
    )
