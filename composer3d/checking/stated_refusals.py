"""Refusals of a plugin, read from its source without running it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from composer3d import errors

__all__ = ["Refusal", "stated_refusals"]

_ELLIPSIS = "..."  # a value that only a run has


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A message with which a plugin refuses, values that only a run has as `...`.

    Args:
        message: What is wrong, or the plugin that it excludes or needs.
        hint: What to write instead; empty where the source states none.
    """

    message: str
    hint: str = ""


def stated_refusals(cls: type) -> list[Refusal]:
    """Return the refusals in the module of a plugin's class, or in its package, in the order of the source.

    These are errors of composer3d that it raises with a message, and names in the `conflicts` and `requires` of its
    transforms. A message that a function assembles is not among them: `check` shows it.
    """
    found: dict[Refusal, None] = {}
    for path in _files(cls):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = _constants(tree)
        stated = [node for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.keyword)]
        for node in sorted(stated, key=lambda node: node.lineno):
            if isinstance(node, ast.keyword) and node.arg in ("conflicts", "requires"):
                found.update(dict.fromkeys(_named(node.arg, node.value, constants)))
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.update(dict.fromkeys(_raised(node.exc, constants)))
    return list(found)


def _files(cls: type) -> list[Path]:
    """Return the source files of a class's module; of a package, of all its modules."""
    module = sys.modules[cls.__module__]
    source = inspect.getsourcefile(module)
    if source is None:
        return []
    path = Path(source)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]


def _raised(call: ast.Call, constants: Mapping[str, ast.expr]) -> Iterator[Refusal]:
    kind = getattr(errors, call.func.id, None) if isinstance(call.func, ast.Name) else None
    if not (isinstance(kind, type) and issubclass(kind, errors.ComposerError)) or not call.args:
        return
    message = _text(call.args[0], constants)
    if not message.replace(_ELLIPSIS, "").strip():
        return
    hint = next((_text(keyword.value, constants) for keyword in call.keywords if keyword.arg == "hint"), "")
    yield Refusal(message=message, hint="" if hint == _ELLIPSIS else hint)


def _named(word: str, node: ast.expr, constants: Mapping[str, ast.expr]) -> Iterator[Refusal]:
    """Yield the other plugins of a literal mapping of names to reasons, conditional ones included."""
    verb = "cannot be combined with" if word == "conflicts" else "needs"
    for part in ast.walk(node):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(part, ast.Dict):
            pairs = list(zip(part.keys, part.values, strict=True))
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "fromkeys":
            names, *reason = part.args
            if isinstance(names, ast.Tuple) and reason:
                pairs = [(name, reason[0]) for name in names.elts]
        for name, why in pairs:
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Refusal(message=f'{verb} "{name.value}": {_text(why, constants)}')


def _constants(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the values of names that get a value once in the file, by an assignment."""
    times: Counter[str] = Counter()
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            times[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            times[node.id] += 1
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return {name: value for name, value in values.items() if times[name] == 1}


def _text(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> str:
    """Return an expression's text, `...` in place of what only a run knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants, depth) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants, depth) + _text(node.right, constants, depth)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants, depth)
    if isinstance(node, ast.Name) and node.id in constants and depth < 3:
        return _text(constants[node.id], constants, depth + 1)
    return _ELLIPSIS
