"""Every sentence of a rule is expected by a test, which plants the fault."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CAUSES = ROOT / "composer3d" / "verification" / "causes"
TESTS = [ROOT / "tests" / name for name in ("verification", "testing", "cli", "step", "plugins", "runner", "core")]
# Words in a row of a sentence that a test has to have, since tests leave out what differs between machines.
ROW = 3
# Said where nothing is found, and where two faults meet.
UNREACHED = {
    "the targets, their mask or the loss, or what cannot be compared",
    "nothing of the others gets there",
}


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the strings of a module with a gap for each value, docstrings apart."""
    bodies = [node.body[0] for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    skipped = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):  # outer nodes come first
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node}
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def rows(text: str) -> set[str]:
    """Return every row of words between the gaps of a sentence."""
    pieces = [piece.split() for piece in re.split(r"\{.*?\}", text)]
    starts = [(words, start) for words in pieces for start in range(len(words) - ROW + 1)]
    return {" ".join(words[start : start + ROW]).strip(".,:;") for words, start in starts}


def is_sentence(text: str) -> bool:
    return len(text.split()) > ROW and bool(rows(text)) and text not in UNREACHED


def test_every_sentence_is_expected_by_a_test():
    expected = " ".join(
        text.replace("\\", "")
        for folder in TESTS
        for path in folder.rglob("test_*.py")
        if path != Path(__file__)
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
    )
    missing = [
        f"{path.name}: {text}"
        for path in sorted(CAUSES.glob("*.py"))
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if is_sentence(text) and not any(row in expected for row in rows(text))
    ]
    assert missing == []
