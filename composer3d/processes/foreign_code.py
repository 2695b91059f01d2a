"""Notes of which code of others runs, so that whoever waits can name what hangs, or what ended the process.

A manifest names modules and callables. What they do while they are imported or called is theirs: an exception is
caught where it is raised, but what never returns, or ends the process, is known only to a process that watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Running", "listen", "own_attribute", "running"]


@dataclass(frozen=True, kw_only=True)
class Running:
    """A piece of code that runs.

    Args:
        doing: What is done with it.
        reference: As the manifest has it, `module:name`; or the dotted table of a plugin.
        limit_s: Seconds after which it counts as hanging; not those in which it could run and others had the cores.
    """

    doing: Literal["imported", "called"]
    reference: str
    limit_s: float

    def to_json(self) -> dict[str, str | float]:
        """Return it as a JSON object."""
        return asdict(self)


Listener = Callable[[Running | None], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)
_RUNS: ContextVar[Running | None] = ContextVar("runs", default=None)
# Heavy packages take tens of seconds to import from a slow disk, and a model of a thousand blocks to be made on meta.
_LIMIT_S = 60.0


def listen(listener: Listener) -> None:
    """Have every beginning and end noted from now on, None where nothing of others runs; for a process of its own."""
    _LISTENER.set(listener)


def own_attribute(module: object, name: str) -> Any:
    """Return what a loaded module has under a name, else None: a `__getattr__` of it, which may raise, is not asked."""
    return getattr(module, "__dict__", {}).get(name)


@contextmanager
def running(doing: Literal["imported", "called"], reference: str, *, limit_s: float = _LIMIT_S) -> Iterator[None]:
    """Note that this code runs inside; nothing where no process listens."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    outer, own = _RUNS.get(), Running(doing=doing, reference=reference, limit_s=limit_s)
    listener(own)
    token = _RUNS.set(own)
    try:
        yield
    finally:
        _RUNS.reset(token)
        listener(outer)
