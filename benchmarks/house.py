"""Shape of the source tree: loose files, names that occur twice, cycles, private imports, large plugins, lines.

A loose file lies in composer3d/ itself. A name is a module's, anywhere in the core and the plugins, but for commands,
which are named for what they call. A cycle is of imports, those of type checkers included. A plugin is a file or a
package; a large one has more than 400 lines. Lines are those of files, comments and blank ones included.

Usage: python benchmarks/house.py [--json | --write]
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import conditions, say, with_marked
from source_tree import CORE, PLUGINS, ROOT, imports, length, module_graph, parse, place, plugin_of, reachable, sources

__all__ = ["ABOVE_COMPOSITION", "LARGE", "MAX_LOOSE", "cycles", "figures", "private_imports", "summary"]

LARGE, MAX_LOOSE = 400, 12
# Written on what the other packages list in `__all__`, as a user would write it.
ABOVE_COMPOSITION = (
    "jobs",
    "models",
    "huggingface",
    "runner",
    "checking",
    "verification",
    "planning",
    "testing",
    "diagnostics",
    "importing",
    "integrations",
    "exporting",
    "scaffolding",
    "examples",
    "selftest",
    "cli",
)
RESULT, README = ROOT / "benchmarks" / "results" / "house.json", ROOT / "benchmarks" / "README.md"
OPENING = re.compile(r"(What|Who|How|Where|Which|From what)\b")


def public_names(module: str) -> frozenset[str]:
    """Return `__all__` of a subject: a package, or a module directly in composer3d; of any other module nothing."""
    folder = CORE.parent.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not folder.is_dir() and folder.parent != CORE:
        return frozenset()
    assigned = [node for node in parse(file).body if isinstance(node, ast.Assign)]
    listed = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return frozenset(ast.literal_eval(listed[0])) if listed else frozenset()


def private_imports() -> list[str]:
    """Return what packages above composition/ import of other packages that these do not list in `__all__`."""
    found = []
    subjects = {path.stem for path in CORE.iterdir()}
    for package in ABOVE_COMPOSITION:
        for path in sources(CORE / package):
            for item in imports(parse(path), typed=True):
                parts = item.module.split(".")
                is_public = item.name in public_names(item.module) or (len(parts) == 1 and item.name in subjects)
                if parts[0] == "composer3d" and parts[1:2] != [package] and not is_public:
                    found.append(f"{place(path, item.line)}: {item.module} {item.name or ''}".rstrip())
    return found


def cycles() -> list[list[str]]:
    """Return every group of modules that import each other.

    `composer3d` itself is left out: it lists the public names for type checkers, and everything may use those.
    """
    graph = {
        name: others - {"composer3d"}
        for name, others in module_graph(CORE, PLUGINS, typed=True).items()
        if name != "composer3d"
    }
    imported = {name: reachable(graph, name) for name in graph}
    groups = {
        frozenset(other for other in others & graph.keys() if name in imported[other])
        for name, others in imported.items()
        if name in others
    }
    return sorted(sorted(group) for group in groups)


def names_twice() -> list[str]:
    """Return the names of modules that occur more than once."""
    stems = Counter(path.stem for path in sources(CORE, PLUGINS) if path.parent.name != "cli")
    return sorted(stem for stem, number in stems.items() if number > 1 and stem not in ("__init__", "__main__"))


def large_plugins() -> list[dict[str, Any]]:
    """Return the plugins with more than LARGE lines, the largest first, with their largest file."""
    plugins: dict[str, list[Path]] = {}
    for path in sources(PLUGINS):
        if len(path.relative_to(PLUGINS).parts) > 2 or path.stem != "__init__":
            plugins.setdefault(plugin_of(path), []).append(path)
    rows = []
    for name, paths in plugins.items():
        largest = max(paths, key=length)
        rows.append(
            {
                "name": name.rpartition(".")[2],
                "lines": sum(map(length, paths)),
                "files": len(paths),
                "largest": str(largest.relative_to(PLUGINS)),
                "largest_lines": length(largest),
            }
        )
    return sorted((row for row in rows if row["lines"] > LARGE), key=lambda row: -row["lines"])


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every docstring: of modules, classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sources(CORE, PLUGINS):
        for node in ast.walk(parse(path)):
            if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None:
                yield place(path, 1 if isinstance(node, ast.Module) else node.lineno), text


def question_openings() -> list[str]:
    """Return the places of docstrings that open with a question's word, where a noun should stand."""
    return [where for where, text in docstrings() if OPENING.match(text)]


def lines_by_package() -> dict[str, int]:
    """Return the lines of each package of the core, each family of plugins, the tests and the benchmarks."""
    counted: Counter[str] = Counter()
    for folder in (CORE, PLUGINS, ROOT / "tests", ROOT / "benchmarks"):
        for path in sources(folder):
            inner = path.relative_to(folder).parts
            is_split = folder in (CORE, PLUGINS) and len(inner) > 1
            counted["/".join((folder.name, inner[0]) if is_split else (folder.name,))] += length(path)
    return dict(sorted(counted.items()))


def figures() -> dict[str, Any]:
    """Return everything that is shown."""
    modules = sources(CORE, PLUGINS)
    return {
        "loose": sorted(path.name for path in CORE.glob("*.py")),
        "twice": names_twice(),
        "cycles": cycles(),
        "private_imports": private_imports(),
        "large_plugins": large_plugins(),
        "question_openings": question_openings(),
        "docstrings": sum(1 for _ in docstrings()),
        "longest": max(map(length, modules)),
        "lines": lines_by_package(),
    }


def summary(found: dict[str, Any]) -> str:
    """Return the figures as they stand in benchmarks/README.md."""
    lines = found["lines"]
    core = sum(number for name, number in lines.items() if name.split("/")[0] == CORE.name)
    plugins = sum(number for name, number in lines.items() if name.split("/")[0] == PLUGINS.name)
    share = len(found["question_openings"]) / found["docstrings"]
    shown = [
        ("loose files in composer3d/", len(found["loose"]), MAX_LOOSE),
        ("module names that occur twice", len(found["twice"]), 0),
        ("cycles of imports, those of type checkers included", len(found["cycles"]), 0),
        ("imports above composition/ of names that are not public", len(found["private_imports"]), 0),
        ("share of docstrings that open with What, Who, How or Where", f"{share:.0%}".replace("%", " %"), "0 %"),
        ("longest file", f"{found['longest']} lines", "400 lines"),
        ("lines of the core", f"{core:,}", "none"),
        ("lines of the plugins", f"{plugins:,}", "none"),
        ("lines of the tests", f"{lines['tests']:,} ({lines['tests'] / (core + plugins):.2f} of both)", "none"),
        ("lines of the benchmarks", f"{lines['benchmarks']:,}", "none"),
    ]
    large = [
        f"| `{row['name']}` | {row['lines']:,} | {row['files']} | `{row['largest']}` | {row['largest_lines']} |"
        for row in found["large_plugins"]
    ]
    packages = [
        f"| {name} | {number:,} |"
        for name, number in lines.items()
        if name.split("/")[0] in (CORE.name, PLUGINS.name) and number > 1
    ]
    return "\n".join(
        [
            "| of the tree | counted | limit |\n|---|---|---|",
            *(f"| {name} | {value} | {limit} |" for name, value, limit in shown),
            f"\n| plugin above {LARGE} lines | lines | files | largest file below plugins/composer3d_plugins/ "
            "| lines of it |\n|---|---|---|---|---|",
            *large,
            "\n| package | lines |\n|---|---|",
            *packages,
            "",
        ]
    )


def main() -> int:
    """Read the command line, count, print; 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description="Show the shape of the source tree.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="write the result and its part of benchmarks/README.md")
    arguments = parser.parse_args()
    found = figures()
    if arguments.write:
        RESULT.write_text(json.dumps({**found, "conditions": conditions()}, indent=1) + "\n")
        README.write_text(with_marked(README.read_text(), "house", summary(found)))
    say(json.dumps(found, indent=1) if arguments.json else summary(found).rstrip())
    kept = not (found["twice"] or found["cycles"] or found["question_openings"])
    return 0 if kept and len(found["loose"]) <= MAX_LOOSE and found["longest"] <= LARGE else 1


if __name__ == "__main__":
    sys.exit(main())
