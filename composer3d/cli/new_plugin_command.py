"""`composer3d new-plugin`: a package of a plugin, with tests that pass."""

from __future__ import annotations

import argparse

from composer3d.cli.options import Subparsers, path
from composer3d.cli.output import pasted, say

__all__ = ["NAME", "add", "execute"]

NAME = "new-plugin"  # no module can have it
FAMILIES = ("sharding", "scheduling", "precision", "communication", "profiling")


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "new-plugin",
        help="write the package of a new plugin, with tests that pass",
        description="Write a package with a worked plugin of a family: the class, its entry point, tests of numerics, "
        "collectives, state and refusals that pass at once, README and CI. Replace what it does by what yours does.",
    )
    parser.add_argument("name", metavar="NAME", help="of its table in manifests: lower case with underscores")
    parser.add_argument("--family", choices=FAMILIES, required=True, help="whose hooks it answers")
    parser.add_argument("--to", metavar="FOLDER", type=path, help="the folder that is made; default: ./NAME")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Write the package, and print the files written."""
    from composer3d.scaffolding import new_plugin

    written = new_plugin(arguments.name, family=arguments.family, folder=arguments.to)
    say("\n".join(f"wrote {file}" for file in written.files))
    say(f'next: cd {pasted(written.folder)} && pip install -e ".[test]" && pytest')
    say(f"a manifest switches it on with the table {written.table}")
    return 0
