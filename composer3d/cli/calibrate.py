"""`composer3d calibrate`: measure the machine at hand, and write the file that `--hardware` takes."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.cli.options import Subparsers, positive
from composer3d.cli.output import say
from composer3d.errors import ComposerError

if TYPE_CHECKING:
    from composer3d.planning.hardware import Measurement

__all__ = ["add", "execute"]

MINUTES = 2.0
_LONGEST, _SLACK_S = 5.0, 60.0


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine for plan and suggest",
        description="Measure matrix products, attention, memory bandwidth, launches and collectives, and write a "
        "hardware file. On CPU it starts the ranks itself; on GPUs of one or several nodes start it under torchrun.",
    )
    parser.add_argument(
        "--output", "-o", type=Path, default=Path("hardware.toml"), metavar="FILE", help="default: hardware.toml"
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
    from composer3d.planning.hardware import hardware_tables, mean_of, problems_of
    from composer3d.processes import default_device

    device = default_device()
    seconds = 60 * arguments.minutes
    if "RANK" in os.environ or device.type != "cpu":
        measured = _joined(device, seconds)
    else:
        measured = _forked(arguments.nproc_per_node or _cores(), seconds)
    if int(os.environ.get("RANK", "0")):
        return 0
    tables = hardware_tables(mean_of(measured), machine=_machine(len(measured)), is_cpu=device.type == "cpu")
    problems = problems_of(tables)
    assert not problems, problems
    try:
        arguments.output.write_text(dump(tables), encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{arguments.output}: cannot be written: {error.strerror}") from error
    _show(tables, arguments.output)
    return 0


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))


def _forked(num_ranks: int, seconds: float) -> list[Measurement]:
    """Measure on ranks of this machine, each on one thread."""
    import torch

    from composer3d.planning.hardware import measure
    from composer3d.testing import run_ranks

    def rank() -> Measurement:
        return measure(torch.device("cpu"), seconds=seconds, per_node=num_ranks)

    return run_ranks(rank, num_ranks, timeout_s=10 * seconds + _SLACK_S)


def _joined(device: Any, seconds: float) -> list[Measurement]:
    """Measure on the ranks of a launcher, or on one device alone."""
    from composer3d import all_gather_json
    from composer3d.planning.hardware import Measurement, measure
    from composer3d.processes import join_world

    release = join_world(device)
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        mine = measure(device, seconds=seconds, per_node=per_node)
        everyone = all_gather_json(asdict(mine))
    finally:
        release()
    return [Measurement(**each) for each in everyone]


def _machine(num_ranks: int) -> str:
    import datetime
    import platform

    import torch

    today = datetime.date.today().isoformat()
    return f"measured on {platform.node()} on {today} with torch {torch.__version__}, {num_ranks} ranks together"


def _show(tables: dict[str, Any], output: Path) -> None:
    device = tables["device"]
    say(f"{device['name']}: " + ", ".join(f"{dtype} {speed}" for dtype, speed in device["peak"].items()))
    say(f"memory {device['memory_bandwidth']}, launch {device['launch']}")
    say(f"between ranks {tables['intra']['bandwidth']}, {tables['intra']['latency']} a step")
    say(f"measured: {', '.join(tables['measured'])}")
    say(f"{output}: composer3d suggest MANIFEST --hardware {output}")
