"""`composer3d init`: a shipped manifest or example, copied to be edited."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from composer3d.cli.options import Subparsers, path
from composer3d.cli.output import complain, pasted, print_table, say
from composer3d.cli.schema import SCHEMA_FILE, heading, write_schema
from composer3d.errors import did_you_mean

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "init",
        help="copy a shipped manifest or example; without a name, ask for model and data, or list them",
        description="Copy a shipped manifest to a file of your own, or a shipped example, a complete small program, to "
        "a folder. Without a name, on a terminal, ask for model, data and devices, and write a manifest; elsewhere, or "
        "with --list, list what is shipped.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the shipped manifest or example")
    parser.add_argument(
        "--to",
        metavar="PATH",
        type=path,
        help="a file, or a folder for it; default: ./NAME.toml; of an example a new folder; default: ./NAME",
    )
    parser.add_argument("--list", action="store_true", help="list shipped manifests and examples, and ask nothing")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Copy one, ask, or list all; never overwrites, and asks only on a terminal."""
    from composer3d.examples import shipped_examples, summary_of
    from composer3d.manifest import shipped

    manifests = {name: content.read_text(encoding="utf-8") for name, content in shipped().items()}
    examples = shipped_examples()
    names = [*manifests, *examples]
    if arguments.list and (arguments.name or arguments.to):
        complain("--list stands alone; composer3d init NAME copies what it lists")
        return 2
    if arguments.name is None and arguments.to is None:
        if not arguments.list and sys.stdin.isatty() and sys.stdout.isatty():
            return _guided()
        print_table(("manifest", "what it is"), [(name, summary_of(text)) for name, text in manifests.items()])
        say("")
        print_table(("example", "what it is"), [(name, example.summary) for name, example in examples.items()])
        return 0
    if arguments.name is None:
        complain(f"--to {arguments.to} needs the NAME of a shipped manifest or example; one of: {', '.join(names)}")
        return 2
    if arguments.name in examples:
        return _example(arguments.name, arguments.to)
    if arguments.name not in manifests:
        hint = did_you_mean(arguments.name, names)
        complain(f'there is no shipped manifest or example "{arguments.name}"' + (f"; {hint}" if hint else ""))
        return 2
    file = f"{arguments.name}.toml"
    target: Path = arguments.to or Path(file)
    return _manifest(manifests[arguments.name], target / file if target.is_dir() else target)


def _guided() -> int:
    """Ask on the terminal; as many ranks as there are GPUs are proposed, or two."""
    from composer3d.cli.guided_init import from_terminal, guide
    from composer3d.processes import default_device

    device = default_device()
    import torch

    devices = torch.cuda.device_count() if device.type == "cuda" else 2
    return guide(from_terminal, devices=devices, device=device.type)


def _manifest(text: str, target: Path) -> int:
    """Write a manifest, and the schema beside it."""
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"{heading()}{text}")
    except FileExistsError:
        complain(f"{target} exists and is not overwritten; name another file with --to FILE")
        return 2
    except OSError as error:
        complain(f"{target} cannot be written: {(error.strerror or str(error)).lower()}")
        return 2
    if code := write_schema(target.parent):
        return code
    say(f"wrote {target}, and {target.with_name(SCHEMA_FILE)} for editors; next: composer3d check {pasted(target)}")
    return 0


def _example(name: str, folder: Path | None) -> int:
    """Write an example's folder, and print the commands that start it."""
    from composer3d.examples import copy_example, shipped_examples

    example, target = shipped_examples()[name], folder or Path(name)
    written = copy_example(example, target, first_lines=heading())
    if code := write_schema(target):
        return code
    say("\n".join(f"wrote {file}" for file in [*written, target / SCHEMA_FILE]))
    say("next:\n" + textwrap.indent("\n".join([f"cd {pasted(target)}", *example.start]), "  "))
    return 0
