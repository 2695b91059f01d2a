"""Sources of what ranks run that no version tells apart: modules beside a manifest, and the loop's own."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["own_sources"]

_REFERENCE = re.compile(r"([^\W\d][\w.]*):[^\W\d][\w.]*")
_PATHS = sysconfig.get_paths()
# composer3d's own are told apart by its version.
_HERE = f"{Path(__file__).resolve().parents[1]}/"
_INSTALLED = tuple({f"{Path(_PATHS[key]).resolve()}/" for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def own_sources(model: nn.Module, texts: Iterable[Any]) -> dict[str, str]:
    """Return digests of code by module: of a model's classes, of what a manifest names, and of what both use.

    Comments and formatting do not count. Installed packages are left out, whose versions say what they are, and so is
    code without a file, as of a notebook's cells.

    Args:
        model: Whose modules' classes are looked at.
        texts: Values of a manifest, of which some are `module:callable`.
    """
    named = (match[1] for text in _strings(texts) if (match := _REFERENCE.fullmatch(text)))
    pending = sorted({*(type(module).__module__ for module in model.modules()), *named})
    found: dict[str, str] = {}
    seen = set(pending)
    while pending:
        name = pending.pop()
        file = _file_of(name)
        if file is None:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # it cannot be what was imported
        found[name] = hashlib.blake2b(ast.dump(tree).encode(), digest_size=6).hexdigest()
        others = {each for each in _imported(tree, name) if each not in seen}
        seen |= others
        pending += sorted(others)
    return found


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from _strings(value)


def _file_of(name: str) -> Path | None:
    """Return a module's file of Python, if it is no installed package's."""
    module = sys.modules.get(name)
    try:
        file = getattr(module, "__file__", None) if module is not None else _spec_origin(name)
        path = Path(file).resolve() if file else None
    except (ImportError, OSError, ValueError, AttributeError):
        return None
    is_own = path is not None and path.suffix == ".py" and not str(path).startswith((*_INSTALLED, _HERE))
    return path if is_own and "site-packages" not in str(path) else None


def _spec_origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name) if "." not in name else None
    return None if spec is None else spec.origin


def _imported(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the modules that a module's code imports when it is imported itself, and what it imports from them.

    What functions import is left out: one rank alone may call them, as for its logs.
    """
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        pending += ast.iter_child_nodes(node)
        names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            whole = ".".join([*filter(None, parts), *([node.module] if node.module else [])])
            names = [whole, *(f"{whole}.{each}" for each in names)]
        yield from (each for each in names if each in sys.modules or ("." not in each and each))
