"""`composer3d suggest`: the best layouts for a model on a cluster, as patches to a manifest."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer3d.cli.options import Subparsers, add_json, add_manifest, memory, path, positive
from composer3d.cli.output import refuse_unwritable_folder, say, say_json
from composer3d.errors import ComposerError
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
    from composer3d.checking import apart

    end_without_collecting()
    refuse_unwritable_folder(arguments.write)
    _refuse_suggestions_of_another(arguments.manifest, arguments.write)
    found = apart(lambda: _found(arguments), [arguments.manifest], arguments.overrides)
    if isinstance(found.answer, str):
        say(found.answer)
    else:
        say_json(found.answer)
    if found.unwritten is not None:
        raise ComposerError(found.unwritten)
    return 0 if found.ok else 1


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Answer of a search, as the command shows it.

    Args:
        ok: Whether a layout fits.
        answer: As text, or for JSON.
        unwritten: Why the layouts are not written; None where they are, or nobody asked.
    """

    ok: bool
    answer: str | Mapping[str, Any]
    unwritten: str | None = None


def _found(arguments: argparse.Namespace) -> _Found:
    """Search, in this process, and write the layouts where that is asked for."""
    from composer3d import suggest

    found = suggest(
        arguments.manifest,
        world_size=arguments.world_size,
        hardware=arguments.hardware,
        memory_bytes=arguments.memory_bytes,
        keep=arguments.keep,
        overrides=arguments.overrides,
    )
    made = _Found(ok=found.ok, answer=found.to_json() if arguments.json else str(found))
    if arguments.write is not None:  # files of an earlier search for this manifest that differ are refused
        try:
            found.write(arguments.write)
        except ComposerError as error:
            return replace(made, unwritten=str(error))
    return made


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
