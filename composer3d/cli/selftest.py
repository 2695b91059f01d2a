"""`composer3d selftest`: this machine, proven."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from composer3d.cli.options import Subparsers, add_json, amount, path
from composer3d.cli.output import coloured, complain, refuse_unwritable, say, say_json
from composer3d.errors import ComposerError

__all__ = ["add", "execute"]

_GOOD = {"holds": True, "cut off": None}
_MINUTES = 5.0


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "selftest",
        help="prove this machine: compositions of all plugins, its links, its GPUs",
        description="Measure the links between ranks of this machine, time steps on a GPU beside hand-written ones, "
        "and prove the covering set of the matrix of plugins on CPU ranks and on GPUs, what covers most first, until "
        "time is up. The report has versions and hardware, and no names of hosts, users or paths. Exit code 1 if "
        "something does not hold, or nothing was proven.",
    )
    parser.add_argument(
        "--minutes", metavar="M", type=amount, default=_MINUTES, help=f"time for all of it; default: {_MINUTES:g}"
    )
    parser.add_argument("--output", metavar="FILE", type=path, help="write the report as JSON to a file, to be shared")
    parser.add_argument("--with-host", action="store_true", help="put the machine's name into the report")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Test, and print every item as it ends; 1 if something does not hold."""
    from composer3d.selftest import SelfTestItem, self_test

    def tell(item: SelfTestItem) -> None:
        first, _, rest = item.text.partition("\n")
        what = coloured(f"{item.outcome:<8}", good=_GOOD.get(item.outcome, False))
        say(f"{what} {item.what:<8} {item.device:<5} {first}  {item.seconds:.0f} s")
        if rest:
            say(textwrap.indent(rest, "    "))

    if arguments.output is not None and arguments.output.exists():
        complain(f"{arguments.output} exists and is not overwritten; name another file with --output")
        return 2
    refuse_unwritable(arguments.output)
    silent = arguments.json
    found = self_test(
        minutes=arguments.minutes, with_host=arguments.with_host, tell=(lambda item: None) if silent else tell
    )
    if arguments.output is not None:
        _write(arguments.output, found.to_json())
    if silent:
        say_json(found.to_json())
        return 0 if found.ok else 1
    if found.absent:
        say(f"left out, since they cannot be imported here: {', '.join(found.absent)}")
    say(_line(found.machine))
    say(coloured(found.summary, good=found.ok))
    return 0 if found.ok else 1


def _line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = ", ".join(f"{gpu['name']} {gpu['memory_gib']:g} GiB" for gpu in machine["gpus"]) or "no GPU"
    system = f"{machine['system']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB"
    return f"{versions}, Python {machine['python']}; {system}; {gpus}"


def _write(path: Path, report: dict[str, Any]) -> None:
    import json

    try:
        path.write_text(json.dumps({"composer3d": 1, **report}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
