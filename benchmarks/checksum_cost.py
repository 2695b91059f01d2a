"""Time and processor time that digests add to a checkpoint's save and load, against the same without.

Each round saves one model's tensors in every form, in an order that turns, so that a disk that slows down slows all.
Before there were digests, archives had torch's CRC-32; that it is left out now pays for them. The form without any
check is taken twice a round: what differs between those two (`control`) no digest caused. All else is compared with
their mean of the same round; quartiles over the rounds say what such a difference is worth.

    python benchmarks/checksum_cost.py [--mib 512] [--rounds 12] [--output benchmarks/results/checksum_cost.json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from composer3d.checkpoint import checksums, load, reader, save, saving

TENSORS = 64


class PlainFile:
    """What torch's writer writes to where nothing is digested: the file itself."""

    def __init__(self, file: Any) -> None:
        self.parts: list[checksums.Part] = []
        self.write, self.tell, self.flush = file.write, file.tell, file.flush
        self.fileno, self.close = file.fileno, file.close


def _look_at_nothing(*args: object, **options: object) -> None:
    """Stand in for a comparison."""


@contextmanager
def without_digests() -> Iterator[None]:
    """Write and read files without looking at them."""
    with (
        mock.patch.object(saving, "DigestedFile", PlainFile),
        mock.patch.object(checksums, "digest", lambda data: "0" * 32),
        mock.patch.object(reader, "verify_part", _look_at_nothing),
        mock.patch.object(checksums.Checksums, "verify_sizes", _look_at_nothing),
        mock.patch.object(checksums, "verify_part", _look_at_nothing),
    ):
        yield


@contextmanager
def with_crc32() -> Iterator[None]:
    """Write archives with torch's CRC-32, and no digests: what a save was before."""
    with without_digests(), mock.patch.object(saving, "_without_crc32", nullcontext):
        yield


FORMS: dict[str, Callable[[], Any]] = {
    "neither": without_digests,
    "crc32": with_crc32,
    "control": without_digests,
    "digests": nullcontext,
}


def measured(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and processor seconds of a call."""
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(mib: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return medians by operation and form, and what each form adds to the two without checks of its round."""
    tensors = {f"w{index}": torch.randn(mib * 2**20 // TENSORS // 4) for index in range(TENSORS)}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        operation: {name: [] for name in FORMS} for operation in ("save", "load")
    }
    folder = Path(tempfile.mkdtemp(prefix="checksum-cost-"))
    try:
        for number in range(rounds + 1):
            names = list(FORMS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                path = folder / name / "step-1"
                shutil.rmtree(path.parent, ignore_errors=True)
                with FORMS[name]():
                    saved = measured(lambda path=path: save(path, tensors=tensors, state={}))  # type: ignore[misc]
                with nullcontext() if name == "digests" else without_digests():
                    loaded = measured(lambda path=path: load(path, tensors=tensors))  # type: ignore[misc]
                if number:  # the first warms up
                    times["save"][name].append(saved)
                    times["load"][name].append(loaded)
    finally:
        shutil.rmtree(folder)
    return {operation: compared(forms) for operation, forms in times.items()}


def compared(forms: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return each form's medians, and what it adds, as a part of the same round without checks."""
    found: dict[str, Any] = {}
    for index, kind in enumerate(("s", "cpu_s")):
        bases = [(one[index] + two[index]) / 2 for one, two in zip(forms["neither"], forms["control"], strict=True)]
        for name, pairs in forms.items():
            added = [pair[index] / base - 1 for pair, base in zip(pairs, bases, strict=True)]
            found[f"{name}_{kind}"] = statistics.median(pair[index] for pair in pairs)
            found[f"{name}_adds_{kind}"] = [round(value, 4) for value in statistics.quantiles(added, n=4)]
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"mib": arguments.mib, "rounds": arguments.rounds, "algorithm": checksums.ALGORITHM}
    result |= measure(arguments.mib, arguments.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
