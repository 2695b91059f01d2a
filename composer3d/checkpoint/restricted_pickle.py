"""Unpickling that calls nothing: each name in a pickle is replaced by a record of the request.

An unpickler with an allow-list of classes still lets a pickle set attributes of these classes, which the rest of the
program shares. Here no name is looked up at all: a class made for this one pickle takes the place of each class and
function, and its instances keep the arguments. The reader of these records interprets them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from composer3d.errors import CheckpointError

__all__ = ["Asked", "Made", "unpickle"]

# Protocol 2 and lower name modules as Python 2 did. Python 3.11.0 to 3.11.3 pickle members of enumerations, as layouts
# and memory formats of tensors, by `getattr`.
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Asked(type):
    """A name in a pickle, in place of the class or function that has it; `full_name` is module and name."""

    full_name: str

    @property
    def __setstate__(cls) -> Any:
        """Refuse: only a pickle that is made to sets attributes of a class or function."""
        raise CheckpointError(f"refused, nothing was executed: it sets attributes of {cls.full_name}")


class Made(metaclass=Asked):
    """A note of one call, or of one instance: its arguments, and the state that was given to it."""

    __slots__ = ("args", "state")
    full_name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Made:
        """Note a call."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Keep the state; no attribute is set from it."""
        self.state = state

    def called(self, *names: str) -> bool:
        """Return whether it is of one of the names."""
        return type(self).full_name in names


def unpickle(data: bytes, *, allowed: Callable[[str, str], bool], refusal: Callable[[str], CheckpointError]) -> Any:
    """Return a pickle's content, with `Asked` and `Made` in place of values that are not plain.

    Args:
        data: A whole pickle, of any protocol.
        allowed: Whether a name of a module may be in it.
        refusal: Makes the error for one that may not.

    Raises:
        CheckpointError: A name that is not allowed, or an attribute of a class that is set.
        Exception: Nearly any, for a damaged pickle.
    """
    known: dict[str, Any] = {}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = _PYTHON_2.get(module, module)
            full_name = f"{module}.{name}"
            if not allowed(module, name):
                raise refusal(full_name)
            if full_name not in known:
                known[full_name] = Asked("Made", (Made,), {"__slots__": (), "full_name": full_name})
            return known[full_name]

        def persistent_load(self, identifier: Any) -> Made:
            return Asked("Made", (Made,), {"__slots__": (), "full_name": "persistent"})(identifier)

    return Unpickler(io.BytesIO(data)).load()
