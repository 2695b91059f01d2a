"""The errors that users meet: one tree, each carrying its data, each saying where, what and how to mend it."""

from __future__ import annotations

import dis
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

__all__ = [
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "ComposerError",
    "DataError",
    "ForkError",
    "HookError",
    "InitialisationError",
    "KeyFault",
    "LockError",
    "LossError",
    "MachineError",
    "ManifestError",
    "MeshError",
    "ModelError",
    "NodeZeroError",
    "PlaceError",
    "NothingShared",
    "NumberTakenError",
    "OrderError",
    "PatternError",
    "PluginError",
    "Problem",
    "QueryError",
    "RankError",
    "ReferenceFailure",
    "RendezvousError",
    "ReplicaError",
    "StepError",
    "TransformError",
    "describe_error",
    "did_you_mean",
    "is_interrupt",
    "known_words",
    "is_of_raise",
]


_LONGEST = 1500  # characters of what somebody else's exception says
_LONGEST_VALUE = 60  # of an argument's value


class ComposerError(Exception):
    """Base of every error that composer3d raises on purpose; its text is meant for the user, without a traceback."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One mistake in a manifest or on the command line.

    Args:
        message: What is wrong, one sentence without its place and without a final stop.
        severity: `error` refuses the manifest, `warning` does so only under `--strict`.
        file: The manifest as the user named it, or `--set KEY=VALUE`; None where no file is involved.
        line: 1-based; None for `--set`.
        column: 1-based; None for `--set`.
        table: Dotted table, for example `model.args`; the empty string is the top of the file.
        key: The key inside the table, if one is at fault.
        hint: How to mend it.
    """

    message: str
    severity: Literal["error", "warning"] = "error"
    file: str | None = None
    line: int | None = None
    column: int | None = None
    table: str | None = None
    key: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        table = f"[{self.table}] " if self.table else ""
        warning = "warning: " if self.severity == "warning" else ""
        return _visible(
            _shortened(f"{place}: " if place else "")
            + warning
            + _shortened(table + self.message)
            + (f"; {_shortened(self.hint)}" if self.hint else "")
        )

    def to_json(self) -> dict[str, Any]:
        """Return the problem as `check --json` prints it."""
        return {key: _shortened(value) if isinstance(value, str) else value for key, value in asdict(self).items()}


def _visible(text: str) -> str:
    """Return a text with what a terminal would obey, or not show, written as escapes; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _shortened(text: str) -> str:
    """Return a text without its middle if it quotes a value that is longer than anybody reads."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 300]} ... {text[-295:]}"


class ManifestError(ComposerError):
    """The manifest cannot be run; `problems` holds every mistake found, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.file or "", p.line or 0, p.column or 0)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ArgumentError(ComposerError):
    """An argument of a function is none that it takes; on the command line the option is named that it came from.

    Args:
        argument: Its name in Python.
        said: What is accepted, or what is wrong; other arguments stand in it in braces: `{hardware}`.
        value: What came; left out where it is not the value that is wrong.

    Attributes:
        function: Which was called; "" as long as that is not known.
        shown: The value as text, "" without one.
    """

    def __init__(self, argument: str, said: str, *, value: object = ...) -> None:
        self.argument, self.said, self.function = argument, said, ""
        self.shown = "" if value is ... else _shown(value)
        super().__init__(argument, said)

    def __str__(self) -> str:
        named = self.argument + (f"={self.shown}" if self.shown else "")
        return f"{f'{self.function}({named})' if self.function else named}: {self._said({})}"

    def for_command(self, options: Mapping[str, str]) -> str:
        """Return the text for a command line.

        Args:
            options: By argument, such as `--set` by `overrides`.
        """
        return f"{options.get(self.argument, self.argument)} {self.shown}".rstrip() + f": {self._said(options)}"

    def _said(self, options: Mapping[str, str]) -> str:
        return re.sub(r"\{([a-z_]+)\}", lambda found: options.get(found[1], found[1]), self.said)


def _shown(value: object) -> str:
    """Return a value in a few words, also one that cannot be shown."""
    try:
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return _visible(text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}...")


class MeshError(ComposerError):
    """Degrees and world do not fit, or an axis is declared twice."""


class NothingShared(MeshError):
    """The world has several ranks, and no plugin an axis of them."""


class ModelError(ComposerError):
    """A model's folder, configuration or weights cannot be used; `key` is the option of `[model]` at fault."""

    def __init__(self, message: str, *, key: str = "hf", hint: str | None = None) -> None:
        self.message, self.key, self.hint = message, key, hint
        super().__init__(message + (f"; {hint}" if hint else ""))


class OrderError(ComposerError):
    """Transforms or step actions cannot be put in an order, or exclude each other."""


class PatternError(ComposerError):
    """A pattern matches nothing in the model."""

    SAID = "matches nothing in the model"

    def __init__(self, pattern: str, hint: str) -> None:
        self.pattern, self.hint = pattern, hint
        super().__init__(f'the pattern "{pattern}" {self.SAID}; {hint}')


class PluginError(ComposerError):
    """A plugin cannot be found, imported or registered, contests an axis, or refuses what its table says.

    Args:
        message: What is wrong.
        hint: How to mend it.
        keys: Path inside the plugin's table to the key at fault; none is the whole table.
    """

    def __init__(self, message: str, *, hint: str | None = None, keys: Sequence[str | int] = ()) -> None:
        self.message, self.hint, self.keys = message, hint, tuple(keys)
        super().__init__(message + (f"; {hint}" if hint else ""))


class HookError(PluginError):
    """Something that a plugin brought, a hook or what it returned, raised what is no ComposerError.

    Args:
        message: Names the plugin and the hook, and quotes the exception with its line.
        path: Of the plugin's table, its family and its name.
        place: Where the table stands.
        is_own: Whether it is no objection of torch's, which may be to tensors on meta or to fake ones, and no lack of
            what the plugin remembers, which may be there in runs alone.
    """

    def __init__(self, message: str, *, path: tuple[str, str], place: str, is_own: bool) -> None:
        super().__init__(message)
        self.path, self.place, self.is_own = path, place, is_own

    def __str__(self) -> str:
        return f"[{'.'.join(self.path)}] ({self.place}): {self.message}"


class QueryError(ComposerError):
    """Two plugins answered one query, or disagreed about one parameter."""


class TransformError(ComposerError):
    """A transform matched nothing, renamed parameters, or did not touch what it had selected.

    Args:
        message: Names the transform.
        path: Of the table of the transform's plugin, its family and its name; None where no plugin is at fault.
        place: Where the table stands.
    """

    def __init__(self, message: str, *, path: tuple[str, str] | None = None, place: str = "") -> None:
        super().__init__(message)
        self.message, self.path, self.place = message, path, place

    def __str__(self) -> str:
        return self.message if self.path is None else f"[{'.'.join(self.path)}] ({self.place}): {self.message}"


class InitialisationError(ComposerError):
    """A factory cannot be recorded, or ranks start from different weights."""


class LossError(ComposerError):
    """The normalisation of a loss is unknown."""


class BatchError(ComposerError):
    """A batch cannot be split as the manifest requires."""


class DataError(ComposerError):
    """A data source is missing, empty, too short, or cannot do what its order needs."""


class ReferenceFailure(ComposerError):
    """A `module:name` of a manifest leads to no object."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message, self.hint = message, hint
        super().__init__(message + (f"; {hint}" if hint else ""))


class StepError(ComposerError):
    """The step protocol was broken: a call outside a step, or ranks that do not run the same step."""


class CheckpointError(ComposerError):
    """A checkpoint is missing, half written, unsafe, or of another model."""


class ForkError(ComposerError):
    """Ranks cannot be started by fork from this process, or there is no room for so many at once."""


class LockError(ComposerError):
    """Another run writes to the same folder."""


class MachineError(ComposerError):
    """The machine lacks what a run needs: space, open files, a folder to write to."""

    def __init__(self, message: str, *, advice: str) -> None:
        self.message, self.advice = message, advice
        super().__init__(message)


class RankError(ComposerError):
    """A rank failed; the text holds its number and traceback."""


class ReplicaError(ComposerError):
    """This group of ranks takes no part in the run any more, or nobody is left who has its state."""


class PlaceError(ComposerError):
    """Options and variables give this machine no place among several."""


class NodeZeroError(ComposerError):
    """The first of several machines does not answer, or cannot take this one yet; it may be started again."""


class NumberTakenError(NodeZeroError):
    """Another process takes part in the run under the number of this machine."""


class RendezvousError(ComposerError):
    """Ranks cannot meet at the address that their environment names."""


class KeyFault(ValueError):
    """Objection of a whole table's validator to one of its keys.

    Attributes:
        key: The key, whose line the user is shown; the message names it too.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is Ctrl-C, and not a KeyboardInterrupt that some module raises as it pleases.

    The handler of the signal raises between two instructions of whatever runs; `raise` is an instruction of its own.
    """
    return isinstance(error, KeyboardInterrupt) and not is_of_raise(error)


def is_of_raise(error: BaseException) -> bool:
    """Return whether Python code raised an exception with `raise`, and not what it called, or a signal."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"


def describe_error(error: BaseException) -> str:
    """Return `ValueError: text`, or `ValueError` where there is no text; also of exceptions that cannot be shown."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return f"{name}: {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}" if text else name


def did_you_mean(word: str, choices: Sequence[str]) -> str | None:
    """Return the hint for a misspelt word: the nearest choice, else the list of them, else None.

    >>> did_you_mean("zeero", ["zero", "units"])
    'did you mean "zero"?'
    >>> did_you_mean("x", ["zero", "units"])
    'one of: units, zero'
    """
    near = get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return "one of: " + ", ".join(sorted(choices)) if choices else None


def known_words(word: str, choices: Sequence[str]) -> str:
    """Return the hint for a word that is none of few choices: the nearest, and all of them.

    >>> known_words("zeero", ["zero", "units"])
    'did you mean "zero"? (known: zero, units)'
    >>> known_words("x", ["zero", "units"])
    'known: zero, units'
    """
    hint, known = did_you_mean(word, choices) or "", ", ".join(choices)
    return f"{hint} (known: {known})" if hint.startswith("did you mean") else f"known: {known}"
