"""Shipped examples: their names, what they show, the commands that start them, and copies of them.

An example is a folder with a `run.toml`, whose first comment says what the example is. Lines `# Start: COMMAND` in that
comment are the commands that start it; `init` prints them, and the tests run them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import takewhile
from pathlib import Path

from composer3d.errors import ComposerError

__all__ = ["Example", "copy_example", "shipped_examples", "summary_of"]

_MANIFEST = "run.toml"
_START = re.compile(r"# Start: (\S.*)")


@dataclass(frozen=True, kw_only=True)
class Example:
    """A shipped example.

    Args:
        name: What `composer3d init` takes.
        summary: One sentence.
        start: The commands that start it, in its folder, in order.
        files: Relative path to content, sorted.
    """

    name: str
    summary: str
    start: tuple[str, ...]
    files: Mapping[str, str]


def shipped_examples() -> Mapping[str, Example]:
    """Return the shipped examples by name, sorted."""
    folders = resources.files("composer3d").joinpath("examples").iterdir()
    found = [_read(folder) for folder in folders if folder.is_dir() and folder.joinpath(_MANIFEST).is_file()]
    return {example.name: example for example in sorted(found, key=lambda example: example.name)}


def copy_example(example: Example, folder: Path, *, first_lines: str = "") -> tuple[Path, ...]:
    """Write an example's files to a new folder.

    Args:
        example: From `shipped_examples`.
        folder: That is made.
        first_lines: Written above its manifest.

    Returns:
        The files written.

    Raises:
        ComposerError: The folder exists, or cannot be written.
    """
    written = []
    try:
        folder.mkdir()
        for path, text in example.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(first_lines + text if path == _MANIFEST else text, encoding="utf-8")
            written.append(target)
    except FileExistsError:
        raise ComposerError(f"{folder} exists and is not overwritten; name another folder with --to FOLDER") from None
    except OSError as error:
        raise ComposerError(f"{folder} cannot be written: {(error.strerror or str(error)).lower()}") from error
    return tuple(written)


def summary_of(manifest: str) -> str:
    """Return the first sentence of the comment that a manifest's text begins with, without its full stop."""
    comment = [line.removeprefix("#").strip() for line in _comment(manifest) if not _START.fullmatch(line)]
    return " ".join(comment).partition(". ")[0].rstrip(".")


def _comment(manifest: str) -> list[str]:
    return list(takewhile(lambda line: line.startswith("#"), manifest.splitlines()))


def _read(folder: Traversable) -> Example:
    files = dict(sorted(_files(folder)))
    manifest = files[_MANIFEST]
    start = tuple(match[1] for line in _comment(manifest) if (match := _START.fullmatch(line)))
    return Example(name=folder.name, summary=summary_of(manifest), start=start, files=files)


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text file below a folder; what Python compiled beside them is left out."""
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield f"{prefix}{entry.name}", entry.read_text(encoding="utf-8")
