"""Docstrings name their subject, and the arguments that there are."""

from __future__ import annotations

import ast
import re

import house
from source_tree import CORE, PLUGINS, parse, place, sources


def test_docstrings_name_their_subject():
    assert house.question_openings() == []


def described(node: ast.AST) -> set[str]:
    """Return the names in the section `Args` of a function's or a class' docstring."""
    text = (ast.get_docstring(node) or "").partition("Args:\n")[2]  # type: ignore[arg-type]
    section = re.match(r"(?:    .*\n|\n(?=    ))*(?:    .*)?", text)
    lines = re.findall(r"^    (\w+(?:, \w+)*): ", section[0] if section else "", re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def taken(node: ast.AST) -> set[str]:
    """Return the arguments of a function, or of what makes a class' instances: its `__init__`, or its fields."""
    if isinstance(node, ast.ClassDef):
        own = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        return own.union(*(taken(item) for item in node.body if getattr(item, "name", "") in ("__init__", "__call__")))
    given = node.args  # type: ignore[attr-defined]
    more = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *more)}


def test_described_arguments_are_there():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    wrong = {
        f"{place(path, node.lineno)} {node.name}": sorted(described(node) - taken(node))
        for path in sources(CORE, PLUGINS)
        for node in ast.walk(parse(path))
        if isinstance(node, kinds) and not (isinstance(node, ast.ClassDef) and node.bases)  # or a base has them
    }
    assert {name: names for name, names in wrong.items() if names} == {}
