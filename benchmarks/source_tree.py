"""Sources of the core and of the plugins, as modules and the imports between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = [
    "CORE",
    "PLUGINS",
    "ROOT",
    "Import",
    "imports",
    "length",
    "module_graph",
    "module_of",
    "parse",
    "place",
    "plugin_of",
    "reachable",
    "sources",
]

ROOT = Path(__file__).resolve().parent.parent
CORE, PLUGINS = ROOT / "composer3d", ROOT / "plugins" / "composer3d_plugins"
EXAMPLES = CORE / "examples"


@dataclass(frozen=True)
class Import:
    """One imported name: `from module import name`, or `import module` with no name."""

    module: str
    name: str | None
    line: int
    relative: bool


def sources(*folders: Path) -> list[Path]:
    """Return the Python files in folders, but those of shipped examples: programs of their own, which `init` copies."""
    found = (path for folder in folders for path in folder.rglob("*.py"))
    return sorted(path for path in found if EXAMPLES not in path.parents or path.parent == EXAMPLES)


@cache
def parse(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def length(path: Path) -> int:
    """Return a file's number of lines."""
    return len(path.read_text(encoding="utf-8").splitlines())


def place(path: Path, line: int) -> str:
    """Return `file:line`, from the root of the repository."""
    return f"{path.relative_to(ROOT)}:{line}"


def imports(tree: ast.AST, *, typed: bool = False) -> Iterator[Import]:
    """Walk everything that runs, functions included; with `typed` also what only type checkers read."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, False)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.module or "", alias.name, node.lineno, node.level > 0)
        nodes.extend(ast.iter_child_nodes(node) if typed or not _is_type_checking(node) else node.orelse)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def module_of(path: Path) -> str:
    """Return a file's dotted name."""
    root = CORE.parent if path.is_relative_to(CORE) else PLUGINS.parent
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def plugin_of(path: Path) -> str:
    """Return the plugin that a file belongs to: `composer3d_plugins.family.name`, be it a file or a package."""
    return ".".join(path.relative_to(PLUGINS.parent).with_suffix("").parts[:3])


def module_graph(*folders: Path, typed: bool = False) -> dict[str, set[str]]:
    """Return every module with those that it imports; `from package import name` may name a module or a value.

    Args:
        folders: By default the core.
        typed: With imports that only type checkers read.
    """
    files = {module_of(path): path for path in sources(*(folders or (CORE,)))}
    graph = {}
    for module, path in files.items():
        found = {
            full if (full := f"{item.module}.{item.name}") in files else item.module
            for item in imports(parse(path), typed=typed)
        }
        graph[module] = {name for name in found if name in files or name.split(".")[0] == "composer3d"} - {module}
    return graph


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return what a module imports, itself or through others."""
    seen: set[str] = set()
    left = list(graph.get(start, ()))
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left.extend(graph.get(name, ()))
    return seen
