"""Terminal output of the commands: results on standard output, problems on standard error, one line each."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

from composer3d.cli.standard_streams import discard, flush, output, writing_output
from composer3d.errors import ComposerError, Problem
from composer3d.processes import file_objection, folder_objection

__all__ = [
    "DRAWING",
    "PAGE",
    "coloured",
    "complain",
    "pasted",
    "print_problems",
    "print_table",
    "refuse_unwritable",
    "refuse_unwritable_folder",
    "say",
    "say_json",
    "write_output",
]

FORMAT = 1
_NARROWEST = 10  # characters of a column below which a drawn table is hard to read
DRAWING, PAGE = "<svg xmln", "<!doctype"  # begin such files
_KIND = 9  # characters that tell kinds of files apart


def say(text: str) -> None:
    """Write a line to standard output.

    Raises:
        OutputError: It cannot be written to.
    """
    with writing_output():
        output().write(f"{text}\n")


def pasted(path: Path | str) -> str:
    """Return a path as it is written in a command that a reader copies into a shell."""
    return shlex.quote(str(path))


def say_json(content: Mapping[str, Any]) -> None:
    """Write one JSON object, marked with its format, to standard output."""
    say(json.dumps(_redacted({"composer3d": FORMAT, **content}), indent=1))


def _redacted(value: Any) -> Any:
    from composer3d.manifest import redacted

    if isinstance(value, Mapping):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def write_output(path: Path, text: str) -> None:
    """Write what a command draws to a file; an existing one is replaced if it begins alike, as an earlier drawing does.

    Raises:
        ComposerError: It holds something else, or cannot be written.
    """
    try:
        _refuse_others(path, text[:_KIND])
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{path}: cannot be written: {error.strerror}") from error


def refuse_unwritable(path: Path | None, *, begins: str | None = None) -> None:
    """Refuse a file that a command could not write at its end, before the command does its work.

    Args:
        path: None is not refused.
        begins: With what `write_output` is going to write, which replaces a file that begins alike; default: not known.

    Raises:
        ComposerError: It cannot be written, or holds something else.
    """
    if path is None:
        return
    if (reason := file_objection(path)) is not None:
        raise ComposerError(f"{path}: cannot be written: {reason}")
    if begins is not None:
        _refuse_others(path, begins[:_KIND])


def refuse_unwritable_folder(path: Path | None) -> None:
    """Refuse a folder that a command could not make, or write into, at its end.

    Args:
        path: None is not refused.

    Raises:
        ComposerError: It cannot be made, or written into.
    """
    if path is not None and (reason := folder_objection(path)) is not None:
        raise ComposerError(f"{path}: cannot be written: {reason}")


def _refuse_others(path: Path, begins: str) -> None:
    """Raise a ComposerError if there is a file that does not begin alike."""
    if path.is_file():
        with path.open("rb") as file:
            found = file.read(_KIND)
        if found and found.lower() != begins.lower().encode():
            raise ComposerError(f"{path} exists, holds something else and is not overwritten; name another file")


def coloured(text: str, *, good: bool | None, stream: TextIO | None = None) -> str:
    """Return a verdict in green, red, or yellow where it is neither good nor bad.

    On a terminal, or where FORCE_COLOR is set; elsewhere, and always where NO_COLOR is set, as it is.

    Args:
        text: One line or more; of several the first is coloured.
        good: Whether the text is good news; None is neither.
        stream: Where it is written; default: standard output.
    """
    stream = sys.stdout if stream is None else stream
    is_able = stream.isatty() and os.environ.get("TERM") != "dumb"
    if os.environ.get("NO_COLOR") or not (is_able or os.environ.get("FORCE_COLOR")):
        return text
    first, line, rest = text.partition("\n")
    number = {True: 32, False: 31, None: 33}[good]
    return f"\x1b[{number}m{first}\x1b[0m{line}{rest}"


def complain(text: str) -> None:
    """Write a line to standard error, without secrets, after flushing standard output.

    Where standard error cannot be written to, nobody can be told that, and the exit code remains.

    Raises:
        OutputError: Standard output cannot be written to.
    """
    from composer3d.manifest import redacted

    flush()
    try:
        sys.stderr.write(f"{redacted(text)}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def print_problems(problems: Sequence[Problem]) -> None:
    """Write every problem on a line of its own to standard error, and their number below."""
    counts = [
        f"{number} {noun}{'' if number == 1 else 's'}"
        for noun, severity in (("problem", "error"), ("warning", "warning"))
        if (number := sum(problem.severity == severity for problem in problems))
    ]
    good = None if all(problem.severity == "warning" for problem in problems) else False
    complain("\n".join([*map(str, problems), coloured(", ".join(counts), good=good, stream=sys.stderr)]))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table: drawn on a terminal, aligned plain text elsewhere; on a narrow terminal a line for each cell.

    Args:
        columns: Heading of each column.
        rows: One text a column.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto")  # None: no bold either
        if console.width < _NARROWEST * len(columns):
            for row in rows:
                say(row[0])
                for column, cell in zip(columns[1:], row[1:], strict=True):
                    say(fill(f"{column}: {cell}", console.width, initial_indent="  ", subsequent_indent="    "))
            return
        table = Table(*columns)
        for row in rows:
            table.add_row(*map(Text, row))
        with writing_output():
            console.print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
