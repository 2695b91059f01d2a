"""Names that the user's code reads when it runs: globals, attributes of modules, imports, and what lies outside of it.

Functions are read from their instructions. Files, and the environment, are read by what no value shows: where a
function that a step may call names what reads them, a digest of values does not do. Which functions a step may call
follows from names: all that are not methods, methods that Python or a library calls, and those whose name stands in
such a function, by which more are found. What only makes an object is not among them, since the object is there.
"""

from __future__ import annotations

import builtins
import dis
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from composer3d.planning.tracing.code_state import is_installed, is_own
from composer3d.processes import own_attribute

__all__ = ["MAKERS", "MISSING", "CodeReads"]

MISSING = object()
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Under these names, of globals and of attributes, stands what reads files, or code that is not there yet.
_READERS = frozenset(
    """check_output exists fromfile genfromtxt getmtime getsize glob iglob import_module is_dir is_file isdir isfile
    iterdir listdir load load_file loadtxt memmap open Popen read_bytes read_csv read_text rglob safe_load safe_open
    scandir stat urlopen walk""".split()
)
_RUNNERS = frozenset(("__import__", "compile", "eval", "exec", "input"))  # of builtins alone: model.eval() is none
_ENVIRONMENT = frozenset(("environ", "environb", "getenv"))
_BY_TEXT = frozenset(("__getattribute__", "attrgetter", "getattr", "methodcaller"))
MAKERS = frozenset(("__init__", "__init_subclass__", "__new__", "__post_init__", "__set_name__", "__setup__"))
_MAKING = frozenset(("__class__", "__init__", "type"))


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """Names in a function's instructions, and in those of functions inside of it.

    Args:
        chains: Globals, each with the attributes that are read of it at once.
        imports: Modules, with the number of packages up that they are looked for.
        names: Of globals and attributes, and all texts.
    """

    chains: tuple[tuple[str, ...], ...]
    imports: tuple[str, ...]
    names: frozenset[str]

    @property
    def reader(self) -> str | None:
        """The name by which it reads files."""
        plain = {chain[0] for chain in self.chains}
        return min((*(self.names & _READERS), *(plain & _RUNNERS)), default=None)


@dataclass(kw_only=True, eq=False)
class _Known:
    """A function of the user's that was met."""

    function: types.FunctionType
    scan: _Scan
    owner: str | None
    is_called: bool
    names: set[str] = field(default_factory=set)

    @property
    def is_maker(self) -> bool:
        return self.owner is not None and self.function.__name__ in MAKERS


class CodeReads:
    """Functions of the user's, what they read, and which of them a step may call."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._aliases: dict[str, set[str]] = {}

    def meet(self, function: types.FunctionType, *, name: str, owner: type | None = None, is_called: bool) -> None:
        """Note a function.

        Args:
            function: Of the user's.
            name: By which code calls it.
            owner: The class of which it is a method.
            is_called: Whether a step may call it, whatever the user's code names.
        """
        known = self._known.get(id(function))
        if known is None:
            scan = _scanned(function.__code__)
            name_of_owner = None if owner is None else owner.__name__
            known = _Known(function=function, scan=scan, owner=name_of_owner, is_called=is_called)
            self._known[id(function)] = known
        known.is_called |= is_called
        known.names |= {name, function.__name__}

    def globals_of(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield what a function reads of globals, and of modules that it imports, by name."""
        scan, space = _scanned(function.__code__), function.__globals__
        for chain in scan.chains:
            name, value = _follow(chain, space)
            if isinstance(value, type | types.FunctionType):
                self._aliases.setdefault(name.rpartition(".")[2], set()).add(value.__name__)
            yield name, value
        for name in scan.imports:
            module = _loaded(name, space)
            if module is not None:
                yield name, module
        if any(chain[0] == "globals" for chain in scan.chains):
            yield "globals", sys.modules.get(str(space.get("__name__")))

    def names(self) -> set[str]:
        """Return the names of globals and attributes in all functions that were met, and all texts."""
        return {name for each in self._known.values() for name in each.scan.names}

    def outside(self) -> tuple[bool, str | None]:
        """Return whether a step may read the environment, and what it may read that nobody knows of, if anything."""
        called = self._called()
        reads_environment = any(each.scan.names & _ENVIRONMENT for each in called)
        for each in called:
            place = f"{each.function.__module__}.{each.function.__qualname__}"
            if each.scan.reader is not None:
                return reads_environment, f"{place} may read files, by {each.scan.reader}"
            for name in each.scan.imports:
                if _is_unknown(name, each.function.__globals__):
                    return reads_environment, f"{place} imports {name.lstrip('.')} when it runs"
        return reads_environment, None

    def _called(self) -> list[_Known]:
        called: list[_Known] = []
        left, names = list(self._known.values()), set[str]()
        while True:
            by_text, makes = bool(names & _BY_TEXT), bool(names & _MAKING)
            found = [each for each in left if _is_called(each, names, by_text=by_text, makes=makes)]
            if not found:
                return called
            called += found
            left = [each for each in left if each not in found]
            for name in {name for each in found for name in each.scan.names}:
                names |= {name, *self._aliases.get(name, ())}


def _is_called(known: _Known, names: set[str], *, by_text: bool, makes: bool) -> bool:
    if known.is_called or not names.isdisjoint(known.names):
        return True
    if known.is_maker:
        return makes or known.owner in names
    return by_text and known.owner is not None


@lru_cache(maxsize=4096)
def _scanned(code: types.CodeType) -> _Scan:
    chains: dict[tuple[str, ...], None] = {}
    imports: dict[str, None] = {}
    names = set(code.co_names)
    chain: tuple[str, ...] = ()
    constants: list[Any] = [None, None]
    for each in dis.get_instructions(code):
        if each.opname in _ATTRIBUTES and chain:
            chain = (*chain, str(each.argval))
            continue
        if chain:
            chains[chain] = None
        chain = (str(each.argval),) if each.opname in _NAMES else ()
        if each.opname == "IMPORT_NAME":
            level = constants[0] if isinstance(constants[0], int) else 0  # then the names that are taken from it
            imports["." * level + str(each.argval)] = None
        if each.opname.startswith("LOAD_"):
            constants = [constants[1], each.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _scanned(constant)
            chains |= dict.fromkeys(inner.chains)
            imports |= dict.fromkeys(inner.imports)
            names |= inner.names
        else:
            names |= {text for text in (constant if isinstance(constant, tuple) else (constant,)) if type(text) is str}
    return _Scan(chains=tuple(chains), imports=tuple(imports), names=frozenset(names))


def _follow(chain: tuple[str, ...], space: Mapping[str, Any]) -> tuple[str, Any]:
    """Return what a chain names, and its name: of attributes those of modules are followed, since others run code."""
    name = chain[0]
    value = space.get(name, MISSING)
    if value is MISSING:
        return name, vars(builtins).get(name, MISSING)
    for attribute in chain[1:]:
        found = vars(value).get(attribute, MISSING) if isinstance(value, types.ModuleType) else MISSING
        if found is MISSING:
            break
        name, value = f"{name}.{attribute}", found
    return name, value


def _absolute(name: str, space: Mapping[str, Any]) -> str:
    package = str(space.get("__package__") or "")
    return importlib.util.resolve_name(name, package) if name.startswith(".") and package else name


def _loaded(name: str, space: Mapping[str, Any]) -> types.ModuleType | None:
    """Return a module of the user's that a function imports; None where it is not loaded, or no user's."""
    try:
        absolute = _absolute(name, space)
    except ImportError:
        return None
    return sys.modules.get(absolute) if is_own(absolute) else None


def _is_unknown(name: str, space: Mapping[str, Any]) -> bool:
    """Return whether a module that a function imports is not loaded yet, and not installed."""
    try:
        absolute = _absolute(name, space)
        if own_attribute(sys.modules.get(absolute), "__name__") is not None:
            return False
        top = absolute.partition(".")[0]
        if top in sys.modules:
            return is_own(top)
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return True
    if spec is None:  # it fails, whatever is installed now
        return name.startswith(".")
    return spec.origin not in ("built-in", "frozen") and not is_installed(spec.origin or "")
