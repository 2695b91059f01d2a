"""Plugins: how a class becomes one, how they are found, and the typed facade over pluggy."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import pluggy
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from composer3d.errors import PluginError, QueryError, describe_error, did_you_mean, is_interrupt
from composer3d.hookspecs import HookSpecs, hookimpl
from composer3d.mesh import Axis
from composer3d.settings import TABLE_CONFIG

__all__ = ["FAMILIES", "Catalogue", "Hooks", "PluginInfo", "hookimpl", "plugin"]

FAMILIES = ("sharding", "scheduling", "precision", "communication", "profiling")
GROUP = "composer3d"
C = TypeVar("C", bound=type)


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """What a plugin's class declares, known to `check` before an instance exists.

    Args:
        family: The table it stands in.
        owns: Axes it owns; of several, the first takes the ranks that `[mesh]` leaves open, where it is a batch axis.
        axes: Axes it adds to the mesh.
        devices: Device types it works on; None is any.
        extra: The extra of its distribution that brings what it imports when it acts.
    """

    family: str
    owns: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    devices: tuple[str, ...] | None = None
    extra: str | None = None


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def plugin(
    *,
    family: str,
    owns: Sequence[str] = (),
    axes: Sequence[Axis] = (),
    devices: Sequence[str] | None = None,
    extra: str | None = None,
) -> Callable[[C], C]:
    """Make a class a plugin: a frozen, keyword-only, strictly typed dataclass whose fields are its table.

    See `PluginInfo` for the arguments.

    >>> @plugin(family="profiling")
    ... class Nothing:
    ...     every: int = 1
    >>> Nothing(every=2).every
    2
    """
    if family not in FAMILIES:
        raise PluginError(f'"{family}" is not a family', hint=did_you_mean(family, FAMILIES))
    info = PluginInfo(
        family=family,
        owns=tuple(owns),
        axes=tuple(axes),
        devices=None if devices is None else tuple(devices),
        extra=extra,
    )

    def decorate(cls: C) -> C:
        result: Any = pydantic_dataclass(frozen=True, kw_only=True, eq=False, config=TABLE_CONFIG)(cls)
        result.__composer3d_plugin__ = info
        return typing.cast(C, result)

    return decorate


def info_of(cls: Any) -> PluginInfo | None:
    """Return what the class declares, or None if it is no plugin."""
    return getattr(cls, "__composer3d_plugin__", None)


class Catalogue:
    """The plugins that are installed, by entry point; each is imported only when a manifest names it."""

    def __init__(self, points: Sequence[EntryPoint]) -> None:
        self._points: dict[str, list[EntryPoint]] = {}
        for point in points:
            same = self._points.setdefault(point.name, [])
            if all(other.value != point.value for other in same):
                same.append(point)

    @classmethod
    def installed(cls) -> Catalogue:
        """Read the metadata of all installed distributions; imports no plugin."""
        return cls(tuple(entry_points(group=GROUP)))

    def names(self) -> tuple[str, ...]:
        """Return all plugin names, sorted."""
        return tuple(sorted(self._points))

    def origin(self, name: str) -> str:
        """Return the distribution and object behind a name, for people."""
        return " and ".join(
            f"{point.value.partition(' ')[0]} ({point.dist.name} {point.dist.version})" if point.dist else point.value
            for point in self._points[name]
        )

    def load(self, name: str) -> type:
        """Import the plugin.

        Raises:
            PluginError: No such plugin, two of that name, an extra that is not installed, or an import that fails.
        """
        points = self._points.get(name)
        if not points:
            raise PluginError(f'no plugin "{name}" is installed', hint=did_you_mean(name, self.names()))
        if len(points) > 1:
            raise PluginError(
                f'two distributions have a plugin "{name}": {self.origin(name)}',
                hint='write use = "module:Class" in its table',
            )
        point = points[0]
        try:
            cls = point.load()
        except ImportError as error:
            raise PluginError(f'the plugin "{name}" cannot be imported: {error}', hint=_install_hint(point)) from error
        except AttributeError as error:
            raise PluginError(f'the plugin "{name}" cannot be imported: {error}') from error
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise PluginError(f'the plugin "{name}" cannot be imported: {describe_error(error)}') from error
        if info_of(cls) is None:
            raise PluginError(f'"{point.value}" is not a plugin', hint="decorate the class with @composer3d.plugin")
        return typing.cast(type, cls)


def _install_hint(point: EntryPoint) -> str | None:
    if not point.extras or point.dist is None:
        return None
    return f'pip install "{point.dist.name}[{",".join(point.extras)}]"'


def options_of(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a plugin's table."""
    return TypeAdapter(cls).json_schema()


@dataclass(frozen=True)
class Registered:
    """A plugin of this run, with the place of its table for messages."""

    name: str
    instance: Any
    place: str

    @property
    def info(self) -> PluginInfo:
        """What its class declares."""
        return typing.cast(PluginInfo, info_of(type(self.instance)))

    def __str__(self) -> str:
        return f"[{self.info.family}.{self.name}] ({self.place})"


class Hooks:
    """The plugins of one run; the rest of composer3d never sees pluggy."""

    def __init__(self, plugins: Sequence[Registered]) -> None:
        self.plugins = tuple(sorted(plugins, key=lambda plugin: plugin.name))
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(HookSpecs)
        for registered in self.plugins:
            self._register(registered)

    def _register(self, registered: Registered) -> None:
        other = self._manager.get_plugin(registered.name)
        if other is not None:
            first = next(plugin for plugin in self.plugins if plugin.instance is other)
            raise PluginError(f"{first} and {registered} have the same name; rename one and write its use")
        for name in dir(registered.instance):
            if name.startswith("composer3d_") and not self._manager.parse_hookimpl_opts(registered.instance, name):
                raise PluginError(
                    f"{registered}: {name} is not marked, so nobody would call it",
                    hint="decorate it with @composer3d.hookimpl",
                )
        try:
            self._manager.register(registered.instance, name=registered.name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"{registered}: {error}", hint="see composer3d.hookspecs for names and arguments"
            ) from None
        for implementation in self._implementations(registered):
            if (
                implementation.tryfirst
                or implementation.trylast
                or implementation.wrapper
                or implementation.hookwrapper
            ):
                raise PluginError(
                    f"{registered}: {implementation.function.__name__} is marked tryfirst, trylast or wrapper",
                    hint="order is declared by phases and after/before; call order carries no meaning",
                )

    def _implementations(self, registered: Registered) -> Iterator[Any]:
        for name in vars(HookSpecs):
            if name.startswith("composer3d_"):
                for implementation in getattr(self._manager.hook, name).get_hookimpls():
                    if implementation.plugin is registered.instance:
                        yield implementation

    def freeze(self, hook: str) -> tuple[tuple[Registered, Callable[..., Any]], ...]:
        """Return every implementation as a function of the spec's keyword arguments, in the order of plugin names."""
        by_plugin = {impl.plugin_name: impl for impl in getattr(self._manager.hook, hook).get_hookimpls()}
        specified = tuple(inspect.signature(getattr(HookSpecs, hook)).parameters)[1:]
        return tuple(
            (registered, _bind(by_plugin[registered.name], specified))
            for registered in self.plugins
            if registered.name in by_plugin
        )

    def call(self, hook: str, **arguments: Any) -> list[tuple[Registered, Any]]:
        """Call every implementation; answers that are None are left out."""
        answers = [(registered, function(**arguments)) for registered, function in self.freeze(hook)]
        return [(registered, answer) for registered, answer in answers if answer is not None]

    def query(self, hook: str, **arguments: Any) -> Any | None:
        """Ask for one answer.

        Raises:
            QueryError: Two plugins gave different ones.
        """
        answers = self.call(hook, **arguments)
        for other, answer in answers[1:]:
            if not _agree(answer, answers[0][1]):
                about = f' for "{arguments["fqn"]}"' if "fqn" in arguments else ""
                raise QueryError(f"{answers[0][0]} and {other} both answer {hook}{about}; remove one of them")
        return answers[0][1] if answers else None

    def collect(self, *hooks: str, **arguments: Any) -> list[tuple[Registered, Any]]:
        """Call hooks that give one thing or several, and return all things with their plugins."""
        result = []
        for hook in hooks:
            for registered, answer in self.call(hook, **arguments):
                items = answer if isinstance(answer, Sequence) else (answer,)
                result += [(registered, item) for item in items]
        return result

    def owners(self) -> Mapping[str, Registered]:
        """Return the owner of every owned axis.

        Raises:
            PluginError: Two plugins own one axis.
        """
        result: dict[str, Registered] = {}
        for registered in self.plugins:
            for axis in registered.info.owns:
                if axis in result:
                    raise PluginError(f'{result[axis]} and {registered} both own the axis "{axis}"; remove one of them')
                result[axis] = registered
        return result


def _agree(one: Any, other: Any) -> bool:
    """Return whether two answers are one; of tensors only the very same are, because comparing them gives a tensor."""
    return one is other or (type(one) is type(other) and not hasattr(one, "shape") and bool(one == other))


def _bind(implementation: Any, specified: tuple[str, ...]) -> Callable[..., Any]:
    """Pass exactly the arguments that the implementation declared."""
    function, wanted = implementation.function, implementation.argnames
    if tuple(wanted) == specified:
        return typing.cast(Callable[..., Any], function)
    return lambda **arguments: function(**{name: arguments[name] for name in wanted})
