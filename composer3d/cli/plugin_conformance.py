"""`composer3d plugins NAME --conformance`: the suite of a plugin, a line for each check."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from composer3d.cli.output import coloured, complain, say, say_json
from composer3d.errors import ComposerError

__all__ = ["test_plugin"]

_BELOW, _WIDE = " " * 4, 120  # of findings below their headings, and in a pipe


def test_plugin(arguments: argparse.Namespace, plugin: type) -> int:
    """Run the suite of a plugin and print every finding as it comes; 1 if something does not hold."""
    from composer3d.manifest import inline
    from composer3d.testing.conformance import Conformance, accepted_options, run_conformance

    case = Conformance(
        plugin=plugin,
        name=arguments.name,
        options=[_toml(text) for text in arguments.options or ("",)],
        beside=_read(arguments.beside) if arguments.beside is not None else "",
        matrix_minutes=arguments.minutes or 1.0,
    )
    if arguments.options is None:
        table, refused = accepted_options(case)
        case = replace(case, options=[table])
        if table and not arguments.json:
            say(f"with {inline(table)}, since its defaults are refused: {refused}")
    found = []
    for finding in run_conformance(case):
        found.append(finding)
        if not arguments.json:
            what = coloured(f"{finding.verdict:<12}", good=finding.ok)
            say(f"{finding.heading:<12} {what} {finding.options}")
            say(_wrapped(finding.detail))
    wrong = [finding for finding in found if not finding.ok]
    if arguments.json:
        say_json({"ok": not wrong, "plugin": arguments.name, "findings": [asdict(finding) for finding in found]})
    elif wrong:
        complain(coloured(f"{len(wrong)} of {len(found)} checks do not hold", good=False))
    else:
        say(coloured(f"conforms: {len(found)} checks hold", good=True))
    return 1 if wrong else 0


def _wrapped(text: str) -> str:
    """Return a finding's lines below its heading, long ones wrapped, but for those of a traceback."""
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    return "\n".join(
        textwrap.indent(line, _BELOW)
        if line.startswith(" ")
        else textwrap.fill(line, max(wide, 40), initial_indent=_BELOW, subsequent_indent=_BELOW, break_long_words=False)
        for line in text.splitlines()
    )


def _toml(text: str) -> dict[str, Any]:
    import tomli

    try:
        return tomli.loads(text.replace(";", "\n"))
    except tomli.TOMLDecodeError as error:
        raise ComposerError(f'--options "{text}" is no TOML: {error}; write for example "limit = 0.1"') from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"--beside {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise ComposerError(f"--beside {path} is not UTF-8: byte 0x{error.object[error.start]:02x}") from None
