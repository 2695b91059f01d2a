"""Fenced blocks and tables of the project's Markdown files, for the tests that execute and compare them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "composer3d/README.md",
    "composer3d/cli/README.md",
    "composer3d/examples/README.md",
    "composer3d/exporting/README.md",
    "composer3d/huggingface/README.md",
    "composer3d/importing/README.md",
    "composer3d/integrations/README.md",
    "composer3d/manifest/README.md",
    "plugins/README.md",
    "tests/README.md",
)

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; `mark` is the comment on the line above it, a file's name or another mark."""

    language: str
    text: str
    mark: str | None
    line: int


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text):
    return [
        Block(
            language=match["language"],
            text=match["text"],
            mark=match["mark"],
            line=text.count("\n", 0, match.start()) + 1,
        )
        for match in _FENCE.finditer(text)
    ]


def files(text):
    """Return the blocks that are files, by name."""
    return {block.mark: block.text for block in blocks(text) if block.mark and re.fullmatch(r"\w+\.\w+", block.mark)}


def table(text, *headings):
    """Return the rows of the only table with these headings, cells as they are written."""
    (rows,) = tables(text, *headings)
    return rows


def tables(text, *headings):
    """Return the rows of every table with these headings."""
    head = "| " + " | ".join(headings) + " |\n"
    found = []
    for after in text.split(head)[1:]:
        lines = after.splitlines()[1:]
        end = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]])
    assert found, headings
    return found


def code(cell):
    """Return the inline code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def links(text):
    """Return the text of every Markdown link, by its target."""
    return {target: shown for shown, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", text)}


def anchors(text):
    """Return the names by which headings are linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def recorded(name):
    """Return the recorded results of a benchmark's last run."""
    return json.loads(read(f"benchmarks/results/{name}.json"))
