"""`composer3d suggest`: the best layouts for a model on a cluster, as patches to a manifest."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from composer3d.cli.options import Subparsers, add_json, add_manifest, memory, path, positive
from composer3d.cli.output import print_problems, refuse_unwritable_folder, say, say_json
from composer3d.errors import ComposerError, ManifestError
from composer3d.processes import end_without_collecting

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "suggest",
        help="find the layouts that suit a model and a cluster best",
        description="Search degrees, ZeRO stages, schedules, micro-batches, recomputation, precision and offloading by "
        "costs that are traced, and print up to five manifests that check accepts and that fit by the plan, as patches "
        "to the given one.",
    )
    add_manifest(parser)
    parser.add_argument("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    parser.add_argument(
        "--hardware", default="h100", metavar="NAME|FILE", help="a shipped cluster or a TOML file; default: h100"
    )
    parser.add_argument(
        "--memory",
        dest="memory_bytes",
        type=memory,
        metavar="SIZE",
        help="of a device; default: what the cluster's has",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help='pin a choice: tp=8, "tp<=8", recompute=full; a key alone keeps the manifest\'s; may be repeated',
    )
    parser.add_argument("--write", type=path, metavar="FOLDER", help="also write each as a manifest that extends this")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Search and print; 1 if nothing fits, 2 if the manifest is wrong."""
    from composer3d import suggest

    end_without_collecting()
    refuse_unwritable_folder(arguments.write)
    _refuse_suggestions_of_another(arguments.manifest, arguments.write)
    try:
        found = suggest(
            arguments.manifest,
            world_size=arguments.world_size,
            hardware=arguments.hardware,
            memory_bytes=arguments.memory_bytes,
            keep=arguments.keep,
            overrides=arguments.overrides,
        )
    except ManifestError as error:
        print_problems(error.problems)
        return 2
    if arguments.json:
        say_json(found.to_json())
    else:
        say(str(found))
    if arguments.write is not None:  # files of an earlier search for this manifest that differ are refused
        found.write(arguments.write)
    return 0 if found.ok else 1


def _refuse_suggestions_of_another(manifest: str, folder: Path | None) -> None:
    """Raise a ComposerError, before a search of minutes, if a folder has suggestions that extend another manifest."""
    import tomli

    for file in sorted(folder.glob("suggestion-*.toml")) if folder is not None and folder.is_dir() else ():
        base = None
        with contextlib.suppress(OSError, ValueError):
            base = tomli.loads(file.read_text(encoding="utf-8")).get("extends")
        if base not in (manifest, str(Path(manifest).resolve())):
            raise ComposerError(
                f"{file} is no suggestion for {manifest}, and is not overwritten; name another folder with --write"
            )
