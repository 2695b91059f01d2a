"""Plain attributes that a forward changes (numbers, flags, lists of them), and the stages in which code reads them.

Every stage has its own modules. Code between blocks runs in its own stage and in all later ones, code inside of a block
or traced call in its own alone; what another stage's code reads then is an attribute that nobody has changed.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from composer3d import TransformError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Changes", "PlainState", "place_name", "refuse_missed_changes"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, defaultdict, list, set, deque, types.SimpleNamespace)
_MOST = 4096  # values in a container that is compared
_OTHER = object()


class Place(Protocol):
    """The forward at work: its place among the blocks or traced calls, and the modules that run."""

    @property
    def place(self) -> int:
        """Index of the block or call at work, or of the next one."""

    @property
    def is_inside(self) -> bool:
        """Whether a block or traced call runs."""

    @property
    def at_work(self) -> str:
        """FQN of the innermost module that runs."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A read or a write of an attribute.

    Attributes:
        place: Index of the block or call at work, or of the next one.
        is_inside: Whether it is at work.
        at_work: FQN of the innermost module at work.
        written: What it held and was given, in `_contents`; None of a read.
    """

    place: int
    is_inside: bool
    at_work: str
    written: tuple[Any, Any] | None = None

    @property
    def is_change(self) -> bool:
        """Whether another value was written."""
        return self.written is not None and self.written[0] != self.written[1]


Changes = Mapping[str, Sequence[Event]]


def refuse_missed_changes(changes: Changes, starts: Sequence[int], names: Sequence[str]) -> None:
    """Refuse stages that read what they do not change as one device does.

    Args:
        changes: Reads and writes of attributes, by name.
        starts: Places at which the stages begin.
        names: Of the blocks or calls.

    Raises:
        TransformError: Names the attribute, and both places.
    """
    for name, events in changes.items():
        for read, write in _missed(events, [max(bisect.bisect_right(starts, event.place) - 1, 0) for event in events]):
            raise TransformError(
                f'the forward changes "{name}", a plain attribute, in {place_name(write.place, names)}, and '
                f"{place_name(read.place, names)} uses it: in a pipeline these are different stages, each of which has "
                "its own modules, and that which uses it would never see the change; change it before the first block "
                "(every stage runs what comes before its own blocks), or train without [scheduling.pipeline]"
            )


def place_name(place: int, names: Sequence[str]) -> str:
    """Return the wording of a place in messages."""
    if place < 0:
        return f'the code before "{names[0]}"'
    return f'the code behind "{names[-1]}"' if place >= len(names) else f'"{names[place]}" or the code before it'


class PlainState:
    """Records reads and writes of plain attributes of a model's modules, and of the objects that these hold.

    Args:
        model: Its modules' classes are others while a forward is recorded.
        forward: Where the forward is.
    """

    def __init__(self, model: nn.Module, forward: Place) -> None:
        self._model, self._forward = model, forward
        self._events: dict[str, list[Event]] = defaultdict(list)
        self._held: dict[str, tuple[Any, Any]] = {}  # containers that were read, and what they held then

    def record(self) -> Callable[[], None]:
        """Begin; return the function that ends it."""
        recorded = [(fqn, module) for fqn, module in self._model.named_modules()]
        recorded += [
            (f"{fqn}.{name}".lstrip("."), value) for fqn, module in recorded for name, value in _objects(module)
        ]
        classes: list[tuple[Any, type]] = []
        for name, owner in {id(owner): (name, owner) for name, owner in reversed(recorded)}.values():
            cls = type(owner)
            try:
                object.__setattr__(owner, "__class__", self._recording(cls, name))
            except TypeError:  # its layout is not that of a class of Python
                continue
            classes.append((owner, cls))

        def end() -> None:
            for owner, cls in classes:
                object.__setattr__(owner, "__class__", cls)
            for name in list(self._held):
                self._settle(name)

        return end

    def changes(self) -> Changes:
        """Return the reads and writes of attributes that were changed."""
        found = {name: [*_without_restored(events)] for name, events in self._events.items()}
        return {name: events for name, events in found.items() if any(event.is_change for event in events)}

    def num_events(self) -> dict[str, int]:
        """Return how many reads and writes there were of each attribute."""
        return {name: len(events) for name, events in self._events.items()}

    def events_since(self, before: Mapping[str, int]) -> Iterator[tuple[str, Event | None]]:
        """Yield reads and writes since `num_events`, by name; None in place of those of containers."""
        for name, events in self._events.items():
            for event in events[before.get(name, 0) :]:
                yield name, None if name in self._held else event

    def add(self, name: str, event: Event) -> None:
        """Add a read of an attribute that is no container."""
        self._events[name].append(event)

    # ---- what is recorded --------------------------------------------------------------------------------------------

    def _recording(self, cls: Any, owner: str) -> type:
        """Return a subclass of the same name whose plain attributes are recorded."""

        def read(this: Any, attribute: str) -> Any:
            value = cls.__getattribute__(this, attribute)
            if type(value) in _PLAIN or type(value) in _CONTAINERS:
                self._read(owner, attribute, value)
            return value

        def write(this: Any, attribute: str, value: Any) -> None:
            before = vars(this).get(attribute, _OTHER)
            cls.__setattr__(this, attribute, value)
            is_property = hasattr(getattr(cls, attribute, None), "__set__")  # which writes another attribute
            if not is_property and (type(value) in _PLAIN or type(value) in _CONTAINERS):
                self._written(owner, attribute, before, value)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ()}
        return type(cls)(cls.__name__, (cls,), {**names, "__getattribute__": read, "__setattr__": write})

    def _read(self, owner: str, attribute: str, value: Any) -> None:
        if _is_torchs(attribute):
            return
        name = f"{owner}.{attribute}".lstrip(".")
        if type(value) in _CONTAINERS:
            self._settle(name)
            self._held[name] = value, _contents(value)
        self._note(name)

    def _written(self, owner: str, attribute: str, before: Any, value: Any) -> None:
        if _is_torchs(attribute):
            return
        name = f"{owner}.{attribute}".lstrip(".")
        self._settle(name)
        self._held.pop(name, None)
        given = _contents(value)
        self._note(name, (given if before is _OTHER and given == () else _contents(before), given))

    def _settle(self, name: str) -> None:
        """Note a write where a container holds other values than when it was read last, at the place of that read."""
        value, held = self._held.get(name, (None, None))
        if value is not None and (now := _contents(value)) != held:
            self._held[name] = value, now
            self._events[name].append(dataclasses.replace(self._events[name][-1], written=(held, now)))

    def _note(self, name: str, written: tuple[Any, Any] | None = None) -> None:
        at = self._forward
        self._events[name].append(Event(at.place, at.is_inside, at.at_work, written))


def _without_restored(events: Sequence[Event]) -> Iterator[Event]:
    """Yield events, without what the code of one place changes and gives back its value: other places never see it."""
    for _, group in itertools.groupby(events, lambda event: (event.place, event.is_inside)):
        run = list(group)
        written = [event.written for event in run if event.written is not None]
        if written and written[0][0] == written[-1][1]:
            run = [event if event.written is None else dataclasses.replace(event, written=(0, 0)) for event in run]
        yield from run


def _missed(events: Sequence[Event], stages: Sequence[int]) -> Iterator[tuple[Event, Event]]:
    """Yield reads with a change that the reading stage does not make, of this forward or of the one before it."""
    writes = [index for index, event in enumerate(events) if event.written is not None]
    for index, read in enumerate(events):
        if read.written is not None:
            continue
        own = [
            write
            for write in writes
            if stages[write] == stages[index] or (stages[write] < stages[index] and not events[write].is_inside)
        ]
        # Where the stage has written it in this forward, what came before that is of no effect.
        since = max((write for write in own if write < index), default=None)
        for write in set(writes) - set(own):
            is_between = since is None or since < write < index
            if is_between and events[write].is_change and not _is_cache(events[write], read, events):
                yield read, events[write]


def _is_cache(write: Event, read: Event, events: Sequence[Event]) -> bool:
    """Return whether a module that several blocks call fills a cache in its first call: each stage fills its own."""
    places = {event.place for event in events if event.is_change}
    return write.is_inside and read.is_inside and write.at_work == read.at_work and len(places) == 1


def _contents(value: Any) -> Any:
    """Return the plain values in a container, in their order; other objects, such as tensors, are left out."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if type(value) in (dict, defaultdict):
        held = tuple((repr(key), _contents(item)) for key, item in value.items())
        return tuple(item for item in held if item[1] is not _OTHER)
    if type(value) in (*_CONTAINERS, tuple):
        held = tuple(map(_contents, value)) if len(value) <= _MOST else ()
        return tuple(item for item in held if item is not _OTHER)
    return repr(value) if isinstance(value, _PLAIN) else _OTHER  # of a number that is none, too


def _objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the objects of Python's classes that a module's own attributes are, by name."""
    import torch

    for name, value in vars(module).items():
        strange = isinstance(value, (type, types.FunctionType, types.ModuleType, torch.nn.Module, torch.Tensor))
        if not _is_torchs(name) and not strange and hasattr(value, "__dict__"):
            yield name, value


@functools.cache
def _torchs() -> frozenset[str]:
    from torch import nn

    return frozenset(vars(nn.Module())) - {"training"}


def _is_torchs(attribute: str) -> bool:
    return attribute in _torchs() or attribute.startswith(("__", "_composer3d"))
