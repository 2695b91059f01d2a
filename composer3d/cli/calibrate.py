"""`composer3d calibrate`: measure the machine at hand, and write the file that `--hardware` takes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from composer3d.cli.options import Subparsers, path, positive
from composer3d.cli.output import refuse_unwritable, say, write_output

__all__ = ["add", "execute"]

BEGINS = "devices_per_node"  # a hardware file that this command wrote
MINUTES = 2.0
_LONGEST = 5.0


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine for plan and suggest",
        description="Measure matrix products, attention, memory bandwidth, launches and collectives, and write a "
        "hardware file. On CPU it starts the ranks itself; on GPUs of one or several nodes start it under torchrun.",
    )
    parser.add_argument(
        "--output", "-o", type=path, default=Path("hardware.toml"), metavar="FILE", help="default: hardware.toml"
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=MINUTES, metavar="M", help=f"at most, about; up to 5; default: {MINUTES:g}"
    )
    parser.add_argument(
        "--nproc-per-node", type=positive, metavar="N", help="ranks on CPU; default: one a core, 8 at most"
    )
    parser.set_defaults(execute=execute)


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of minutes above 0 and up to {_LONGEST:g}')
    return value


def execute(arguments: argparse.Namespace) -> int:
    """Measure and write; on other ranks than the first, measure only."""
    from composer3d.manifest import dump
    from composer3d.planning.hardware import measure_machine

    if os.environ.get("RANK", "0") == "0":  # which is the one that writes
        refuse_unwritable(arguments.output, begins=BEGINS)
    tables = measure_machine(seconds=60 * arguments.minutes, num_ranks=arguments.nproc_per_node)
    if tables is None:
        return 0
    write_output(arguments.output, dump(tables))
    _show(tables, arguments.output)
    return 0


def _show(tables: dict[str, Any], output: Path) -> None:
    device = tables["device"]
    say(f"{device['name']}: " + ", ".join(f"{dtype} {speed}" for dtype, speed in device["peak"].items()))
    say(f"memory {device['memory_bandwidth']}, launch {device['launch']}")
    say(f"between ranks {tables['intra']['bandwidth']}, {tables['intra']['latency']} a step")
    say(f"measured: {', '.join(tables['measured'])}")
    say(f"{output}: composer3d suggest MANIFEST --hardware {output}")
