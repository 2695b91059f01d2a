"""`composer3d import`: a configuration of another system becomes a manifest, and a checkpoint one of composer3d."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer3d.cli.options import Subparsers, add_json, path, positive
from composer3d.cli.output import (
    coloured,
    complain,
    pasted,
    print_problems,
    refuse_unwritable,
    refuse_unwritable_folder,
    say,
    say_json,
)

__all__ = ["NAME", "add", "execute"]

NAME = "import"  # no module can have it


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "import",
        help="translate a configuration of another system into a manifest",
        description="Translate a configuration of another system into a manifest, say what became of every key, and "
        "check the manifest. The source is read, never run. Exit codes: 1 if a key is refused or check finds "
        "something, 2 if the source cannot be read.",
    )
    parser.add_argument(
        "source",
        metavar="FILE",
        nargs="*",
        help="the configuration: a file, a launch script or a log; after -- Megatron-LM's flags, alone or over it",
    )
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help="whose it is; default: recognised by its keys")
    parser.add_argument(
        "--for",
        dest="target",
        choices=("compose", "run"),
        help="a manifest for a loop of your own, or of composer3d run; default: what such files describe",
    )
    parser.add_argument(
        "--training-args",
        metavar="FILE",
        type=path,
        help='arguments of transformers\' Trainer, as JSON, YAML or a command line: they fill in "auto"',
    )
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks of the run, where the file is silent")
    parser.add_argument("--model", metavar="USE", help="module:callable, or a Hugging Face model's folder")
    parser.add_argument("--data", metavar="USE", help="the data: a file, a folder, or module:callable")
    parser.add_argument("--source-version", metavar="V", help="of the source system, where defaults differ")
    parser.add_argument(
        "--allow", metavar="KEY", action="append", default=[], help="go on without a key that is refused; repeatable"
    )
    parser.add_argument(
        "--arg",
        dest="values",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="value of a variable that a launch script takes from outside, or of its argument 1, 2, ...; repeatable",
    )
    parser.add_argument("--output", metavar="FILE", type=path, help="where to write the manifest; default: printed")
    _add_checkpoints(parser)
    add_json(parser)
    parser.set_defaults(execute=execute)


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints", "FILE is a checkpoint's folder: weights and optimizer state")
    group.add_argument("--to", metavar="FOLDER", type=path, help="where to write the folder step-N of a checkpoint")
    group.add_argument("--step", type=int, metavar="N", help="steps that were done, where the checkpoint is silent")
    group.add_argument("--optimizer", metavar="CLASS", help="of the run that goes on; default: AdamW or SGD, by names")
    group.add_argument("--dtype", metavar="DTYPE", help="of weights and moments; default: as the checkpoint has them")
    group.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="beginning of the names of weights, and what the model has in its place; repeatable",
    )
    group.add_argument(
        "--names",
        metavar="KIND",
        help="of the model that Megatron-LM's tensors are named for: llama (composer3d.models:llama), or huggingface; "
        "--arg num_attention_heads=N says what its checkpoint does not",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Import, print the report and write the manifest; 1 where a key is refused or the manifest is wrong."""
    from composer3d import import_config

    words: list[str] = arguments.source
    if arguments.to is not None:
        return _import_checkpoint(arguments)
    source = words[0] if words and not words[0].startswith("-") else None
    flags = words if source is None else words[1:]
    values = dict(value.partition("=")[::2] for value in arguments.values)
    wrong = _wrong(source, flags, arguments.values)
    if wrong is not None:
        complain(wrong)
        return 2
    output: Path | None = arguments.output
    if output is not None and output.exists():
        complain(f"{output} exists and is not overwritten; name another file with --output FILE")
        return 2
    refuse_unwritable(output)
    result = import_config(
        source,
        flags=flags,
        values=values,
        system=arguments.system,
        target=arguments.target,
        training_args=arguments.training_args,
        world_size=arguments.world_size,
        model=arguments.model,
        data=arguments.data,
        source_version=arguments.source_version,
        allow=arguments.allow,
        name=None if output is None else str(output),
    )
    if result.manifest and output is not None:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(result.manifest)
        except OSError as error:
            complain(f"{output} cannot be written: {(error.strerror or str(error)).lower()}")
            return 2
    if arguments.json:
        say_json(result.to_json())
    else:
        complain("\n".join(result.lines()))
        if result.problems:
            print_problems(result.problems)
        if result.manifest and output is not None:
            world = "" if result.world_size is None else f" --world-size {result.world_size}"
            say(coloured(f"wrote {output}; next: composer3d check {pasted(output)}{world}", good=result.ok))
        elif result.manifest:
            say(result.manifest.rstrip("\n"))
    return 0 if result.ok else 1


def _import_checkpoint(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint; 2 where it cannot be read."""
    from composer3d.errors import CheckpointError
    from composer3d.importing.foreign_checkpoints import import_checkpoint

    if len(arguments.source) != 1:
        complain("name one checkpoint: composer3d import CHECKPOINT --to FOLDER")
        return 2
    unnamed = next((each for each in arguments.rename if "=" not in each), None)
    if unnamed is not None:
        complain(f"--rename {unnamed}: write OLD=NEW")
        return 2
    wrong = _wrong(arguments.source[0], [], arguments.values)
    if wrong is not None:
        complain(wrong)
        return 2
    refuse_unwritable_folder(arguments.to)
    try:
        result = import_checkpoint(
            arguments.source[0],
            arguments.to,
            step=arguments.step,
            optimizer=arguments.optimizer,
            names=dict(each.partition("=")[::2] for each in arguments.rename),
            dtype=arguments.dtype,
            naming=arguments.names,
            arguments=dict(each.partition("=")[::2] for each in arguments.values),
        )
    except CheckpointError as error:
        complain(str(error))
        return 2
    if arguments.json:
        say_json(result.to_json())
        return 0
    complain("\n".join(result.lines()))
    say(coloured(f"wrote {result.path}; next: composer3d run run.toml --resume {pasted(result.path)}", good=True))
    return 0


def _wrong(source: str | None, flags: list[str], values: list[str]) -> str | None:
    if source is None and not flags:
        return "name a file, or write Megatron-LM's flags after --"
    if flags and not flags[0].startswith("-"):
        return f"one file at a time: {flags[0]}"
    unnamed = next((value for value in values if "=" not in value), None)
    return None if unnamed is None else f"--arg {unnamed}: write NAME=VALUE"
