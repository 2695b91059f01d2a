"""`composer3d init`: a shipped manifest, copied to be edited."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer3d.cli.options import Subparsers
from composer3d.cli.output import complain, print_table, say
from composer3d.cli.schema import schema_text
from composer3d.errors import did_you_mean

__all__ = ["add", "execute"]

# Editors take it from the line `#:schema` of a manifest; Taplo and those who follow it.
SCHEMA = "composer3d.schema.json"


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "init",
        help="copy a shipped manifest; without a name, list them",
        description="Copy a shipped manifest to a file of your own. Without a name, list the shipped manifests.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the shipped manifest")
    parser.add_argument("--to", metavar="FILE", type=Path, help="where to; default: ./NAME.toml")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Copy one, or list all; never overwrites."""
    from composer3d.manifest import shipped

    manifests = {name: content.read_text(encoding="utf-8") for name, content in shipped().items()}
    if arguments.name is None and arguments.to is None:
        print_table(("manifest", "what it is"), [(name, _summary(text)) for name, text in manifests.items()])
        return 0
    if arguments.name is None:
        complain(f"--to {arguments.to} needs the NAME of a shipped manifest; one of: {', '.join(manifests)}")
        return 2
    if arguments.name not in manifests:
        hint = did_you_mean(arguments.name, list(manifests))
        complain(f'there is no shipped manifest "{arguments.name}"' + (f"; {hint}" if hint else ""))
        return 2
    target = arguments.to or Path(f"{arguments.name}.toml")
    schema = target.with_name(SCHEMA)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"#:schema {SCHEMA}\n{manifests[arguments.name]}")
        schema.write_text(f"{schema_text()}\n", encoding="utf-8")
    except FileExistsError:
        complain(f"{target} exists and is not overwritten; name another file with --to FILE")
        return 2
    except OSError as error:
        complain(f"{target} cannot be written: {(error.strerror or str(error)).lower()}")
        return 2
    say(f"wrote {target}, and {schema} for editors; next: composer3d check {target}")
    return 0


def _summary(text: str) -> str:
    """Return the comment on the manifest's first line."""
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
