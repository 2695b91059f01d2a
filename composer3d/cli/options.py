"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import errno
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "Subparsers",
    "add_json",
    "add_manifest",
    "add_overrides",
    "add_strict",
    "amount",
    "bandwidth",
    "memory",
    "natural",
    "path",
    "positive",
    "price",
    "seconds",
    "size",
]

Subparsers: TypeAlias = Any  # argparse keeps the type of its subparsers to itself

_SMALLEST = 1 << 20  # bytes of a device that are taken for bytes without a unit
_SMALLEST_BANDWIDTH = 1_000_000  # bytes a second that are
_LARGEST = 1 << 63  # bytes, above every size
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def add_manifest(parser: argparse.ArgumentParser) -> None:
    """Add MANIFEST and `--set`."""
    parser.add_argument("manifest", metavar="MANIFEST", help="a path, or the name of a shipped manifest")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `--set`."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="TABLE.KEY=VALUE",
        action="append",
        default=[],
        help="override a key of the manifest; VALUE is TOML, or a string; may be repeated",
    )


def add_strict(parser: argparse.ArgumentParser) -> None:
    """Add `--strict`."""
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def natural(text: str) -> int:
    """Read a whole number of at least 0, as an argument's type.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    return _whole(text, at_least=0)


def positive(text: str) -> int:
    """Read a whole number of at least 1, as an argument's type.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    return _whole(text, at_least=1)


def _whole(text: str, *, at_least: int) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) < at_least:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least {at_least}')
    return int(text)


def size(text: str) -> int:
    """Read a number of bytes with its unit, for example `5GiB`, as an argument's type.

    >>> size("5GiB"), size("1.5 kB"), size("100")
    (5368709120, 1500, 100)

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGTkmgt]?i?B?)", text)
    unit = match[2].upper().replace("I", "i") if match else None
    if match is None or unit not in _UNITS or not 1 <= float(match[1]) * _UNITS[unit] < _LARGEST:
        raise argparse.ArgumentTypeError(f'"{text}" is not a size; write for example 5GiB or 500MB')
    return int(float(match[1]) * _UNITS[unit])


def path(text: str) -> Path:
    """Read a path, as an argument's type; whether something is there is left to the command.

    Raises:
        argparse.ArgumentTypeError: No file system takes such a name.
    """
    try:
        os.lstat(text)
    except ValueError:
        raise argparse.ArgumentTypeError("a path holds no character NUL") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f'"{text[:40]}..." is longer than a path can be') from None
    return Path(text)


def memory(text: str) -> int:
    """Read the size of a device's memory, as an argument's type; a number without a unit must be one of bytes.

    >>> memory("80GiB")
    85899345920

    Raises:
        argparse.ArgumentTypeError: It is none, or a number without a unit that can hardly be meant as bytes.
    """
    if re.fullmatch(r"[0-9.]+", text) and size(text) < _SMALLEST:
        raise argparse.ArgumentTypeError(f'"{text}" has no unit; write for example {text}GiB')
    return size(text)


def amount(text: str) -> float:
    """Read a number above 0 that is not infinite, as an argument's type.

    >>> amount("2e12")
    2000000000000.0

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number above 0, such as 2000 or 2e3')
    return value


def seconds(text: str) -> float:
    """Read a number of seconds, 0 or more, as an argument's type.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else amount(text)


def bandwidth(text: str) -> int:
    """Read bytes a second as a size, as an argument's type; a number without a unit must be one of bytes.

    Raises:
        argparse.ArgumentTypeError: It is none, or a number without a unit that can hardly be meant as bytes.
    """
    if re.fullmatch(r"[0-9.]+", text) and size(text) < _SMALLEST_BANDWIDTH:
        raise argparse.ArgumentTypeError(f'"{text}" has no unit; write for example {text}GB')
    return size(text)


def price(text: str) -> tuple[float, str]:
    """Parse an amount of money, as an argument's type; return it with its currency symbol.

    >>> price("2.5"), price("$2.5"), price("2.5 EUR")
    ((2.5, '$'), (2.5, '$'), (2.5, 'EUR '))

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    match = re.fullmatch(r"([^\d\s.,+-]*) ?([0-9.]+) ?([^\d\s.,+-]*)", text.strip())
    if match is None or (match[1] and match[3]):
        raise argparse.ArgumentTypeError(f'"{text}" is not a price; write for example 2.5 or "2.5 EUR"')
    currency = match[1] or match[3] or "$"
    return amount(match[2]), currency if len(currency) == 1 else f"{currency} "
