"""Operators that Python code has defined, or given functions: where it did, and which functions are known."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["python_operators"]

# Of torch's text about an operator: its schema, and its function under each dispatch key.
_REGISTERED = re.compile(r"^(debug|\w+)[^:\n]*: registered at (.+?):\d+( |$)", re.MULTILINE)


class _PythonOperator(NamedTuple):
    """An operator that Python code has defined, or given functions.

    Args:
        name: `namespace::name`.
        schema: The file that has defined it; empty where torch does not know, as of `torch.library.define`.
        functions: What is known of them, each with the file that has given it.
        files: That have given it functions which nobody keeps; empty where torch does not know.
    """

    name: str
    schema: str
    functions: tuple[tuple[str, Any], ...]
    files: frozenset[str]


def python_operators() -> Iterator[_PythonOperator]:
    """Yield them in the order of their names, torch's own among them.

    Private: torch's sets of what Python has registered, its text about an operator, and what it keeps of
    `torch.library.custom_op` and `torch.library.register_fake`: the functions that `Library.impl` takes are kept in
    C++ alone.
    """
    from torch import _C, library
    from torch._library import custom_ops, simple_registry

    known: Any = simple_registry.singleton._data
    names = library._defs | {"::".join(key.split("/")[:2]) for key in library._impls} | known.keys()
    for name in sorted(names):
        definition = custom_ops.OPDEFS.get(name)
        functions = [] if definition is None else [*_functions_of(definition)]
        fakes = [*known[name].fake_impl.kernels] if name in known else []
        places = {library.__file__: "", custom_ops.__file__: functions[0][0] if functions else ""}
        functions += [(fake.source.rpartition(":")[0], fake.func) for fake in fakes]
        text = _C._dispatch_dump("".join(name.split()))  # one name of torch's has a line's end in it
        registered = [match.group(1, 2) for match in _REGISTERED.finditer(text)]
        yield _PythonOperator(
            name=name,
            schema=next((places.get(file, file) for key, file in registered if key == "debug"), ""),
            functions=tuple(functions),
            files=frozenset(
                places.get(file, file)
                for key, file in registered
                if key != "debug"
                and file.endswith(".py")
                and not (fakes and key == "Meta")
                and not (definition is not None and file == custom_ops.__file__)
            ),
        )


def _functions_of(definition: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a `CustomOpDef`, also those for single devices and classes of tensors."""
    for value in vars(definition).values():
        for each in value.values() if isinstance(value, dict) else (value,):
            if inspect.isfunction(each):
                yield each.__code__.co_filename, each
