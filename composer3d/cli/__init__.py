"""The command `composer3d`: one module per command, each with `add` (its arguments) and `execute` (its action).

Exit codes: 0 good; 1 what was asked does not hold; 2 the manifest or the command line is wrong; 3 the run failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from composer3d.cli import (
    calibrate,
    check,
    completion,
    doctor,
    export,
    import_command,
    init,
    launch,
    new_plugin_command,
    plan,
    plugins,
    run,
    schedule,
    schema,
    selftest,
    suggest,
    timeline,
    tune,
    verify,
)
from composer3d.cli.output import complain, print_problems, say
from composer3d.cli.standard_streams import OutputError, discard, flush, open_missing_streams, reserved_output
from composer3d.errors import ArgumentError, ComposerError, ForkError, ManifestError, did_you_mean
from composer3d.processes import ChildError, machine_error

__all__ = ["build_parser", "main"]

COMMANDS = (
    run,
    check,
    plan,
    suggest,
    tune,
    calibrate,
    verify,
    launch,
    schedule,
    timeline,
    doctor,
    selftest,
    plugins,
    schema,
    init,
    export,
    import_command,
    new_plugin_command,
    completion,
)
WRONG, FAILED = 2, 3


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Imports neither torch nor a plugin."""
    parser = _Parser(
        prog="composer3d",
        description="Compose parallelism onto any torch.nn.Module from a TOML manifest.",
        epilog="Exit codes: 0 good; 1 what was asked does not hold; 2 the manifest or the command line is wrong; "
        "3 the run failed; 75 of groups on several machines, this one may be started again; it has left, or is without "
        "one that serves the run.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of composer3d and torch")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    for each in subparsers.choices.values():
        each.set_defaults(option_names=each.option_names())
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse leaves by itself after a help that it could not write, as if it had."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # No option begins with a digit: `--memory -5GiB` is a size that is none, and not an option without its value.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse options that there are not by the name of their command, and before what else is missing."""
        known = self._option_string_actions
        for word in args or ():
            name = word.partition("=")[0]
            # What follows `--`, a command's name or `--words` is not this parser's.
            is_over = word == "--" or (self._subparsers is not None and not word.startswith("-"))
            if is_over or (name in known and known[name].nargs == argparse.REMAINDER):
                break
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                options = [option for option in known if option.startswith("--")]
                self.error(f'there is no option "{name}"; {did_you_mean(name, options)}')
        return super().parse_known_args(args, namespace)

    def option_names(self) -> dict[str, str]:
        """Return how an argument is written on the command line, by its name in Python."""
        return {
            action.dest if action.option_strings else str(action.metavar).lower(): (
                action.option_strings[-1] if action.option_strings else str(action.metavar)
            )
            for action in self._actions
        }

    def print_help(self, file: Any = None) -> None:
        if file is None:
            say(self.format_help().removesuffix("\n"))
        else:
            super().print_help(file)


class _Version(argparse.Action):
    """Reads metadata alone: torch takes a second to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        shown = []
        for name in ("composer3d", "torch"):
            try:
                shown.append(f"{name} {version(name)}")
            except PackageNotFoundError:  # a checkout that is not installed
                shown.append(f"{name} not installed")
        say(", ".join(shown))
        parser.exit()


def _misspelt(argv: Sequence[str]) -> str | None:
    """Return the message for a first word that is no command; None where it is one, or an option."""
    names = [getattr(command, "NAME", command.__name__.rpartition(".")[2]) for command in COMMANDS]
    if not argv or argv[0].startswith("-") or argv[0] in names:
        return None
    if argv[0].endswith(".toml"):
        return f'there is no command "{argv[0]}"; to train write composer3d run {argv[0]}'
    return f'there is no command "{argv[0]}"; {did_you_mean(argv[0], names)}'


def _empty(argv: Sequence[str]) -> str | None:
    """Return the message for an option that is given `--` as its value, which argparse drops without a word."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    found = next((word for word in options if re.fullmatch(r"--\w[\w-]*=--", word)), None)
    return None if found is None else f'{found}: "--" is no value; {found.removesuffix("=--")} expects one'


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Mistakes of the user are reported without a traceback; other errors keep theirs.

    Args:
        argv: The command line without the program's name; default: this process's.
    """
    open_missing_streams()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        flush()
    except OutputError as error:
        discard(sys.stdout)
        if error.is_read_no_more:  # the reader, `head` for example, has seen enough
            return 0
        complain(str(error))
        return FAILED
    return code


def _run(words: Sequence[str]) -> int:
    """Run one command, report its errors, and return its exit code."""
    if (wrong := _misspelt(words) or _empty(words)) is not None:
        complain(wrong)
        return WRONG
    try:
        arguments = build_parser().parse_args(words)
    except SystemExit as leaving:  # argparse leaves by itself: 0 after --help, 2 for a wrong command line
        return leaving.code if isinstance(leaving.code, int) else WRONG
    try:
        with reserved_output() if getattr(arguments, "json", False) else nullcontext():
            code: int = arguments.execute(arguments)
        return code
    except OutputError:
        raise
    except ManifestError as error:
        print_problems(error.problems)
        return WRONG
    except ArgumentError as error:
        complain(error.for_command(arguments.option_names))
        return WRONG
    except (ForkError, ChildError) as error:  # the request is valid, but this process cannot start ranks
        complain(str(error))
        return FAILED
    except ComposerError as error:
        complain(str(error))
        return WRONG
    except KeyboardInterrupt:
        complain("interrupted")
        return FAILED
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Report an error of the machine in a sentence, and any other with its traceback."""
    machine = machine_error(error)
    if machine is None:
        complain(traceback.format_exc().rstrip())
    else:
        complain(f"{machine}\ntry: {machine.advice}")
    return FAILED
