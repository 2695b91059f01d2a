"""Time and processor time that digests add to a checkpoint's save and load, against the same without.

Each round saves one model's tensors in every form, in an order that turns, so that a disk that slows down slows all.
Before there were digests, archives had torch's CRC-32; that it is left out now pays for them. Differences between saves
are as large as the disk's moods, so the time that writes take beyond the system's own is measured besides: `share_s` is
that part of a save with digests.

    python benchmarks/checksum_cost.py [--mib 512] [--rounds 7] [--output benchmarks/results/checksum_cost.json]
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


class Unread:
    """Stands in for a digest, and looks at nothing."""

    def update(self, data: object) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def hexdigest(self) -> str:
        """Return what stands for a digest."""
        return "0" * 32


class TimedFile(checksums.DigestedFile):
    """A file that knows how long its writes took beside the system's own, all of its kind together."""

    written_s = system_s = 0.0

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._file = _TimedWrites(file)

    def write(self, data: Any) -> int:
        """Write, and add up the time of both."""
        begin = time.perf_counter()
        length = super().write(data)
        TimedFile.written_s += time.perf_counter() - begin
        return length


class _TimedWrites:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close

    def write(self, data: Any) -> None:
        begin = time.perf_counter()
        self._file.write(data)
        TimedFile.system_s += time.perf_counter() - begin


def _look_at_nothing(*args: object, **options: object) -> None:
    """Stand in for a comparison."""


@contextmanager
def without_digests() -> Iterator[None]:
    """Write and read files without looking at them."""
    with (
        mock.patch.object(checksums.xxhash, "xxh3_128", Unread),
        mock.patch.object(checksums, "digest", lambda data: "0" * 32),
        mock.patch.object(reader, "verify_part", _look_at_nothing),
        mock.patch.object(checksums, "verify_part", _look_at_nothing),
    ):
        yield


@contextmanager
def with_crc32() -> Iterator[None]:
    """Write archives with torch's CRC-32, and no digests: what a save was before."""
    with without_digests(), mock.patch.object(saving, "_without_crc32", nullcontext):
        yield


def timed() -> Any:
    """Compute digests, and take the time that writes wait for them."""
    return mock.patch.object(saving, "DigestedFile", TimedFile)


FORMS: dict[str, Callable[[], Any]] = {"crc32": with_crc32, "neither": without_digests, "digests": timed}


def measured(action: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and processor seconds of a call."""
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(mib: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians by operation and form."""
    tensors = {f"w{index}": torch.randn(mib * 2**20 // TENSORS // 4) for index in range(TENSORS)}
    times: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in ("save", "load")}
    shares: list[float] = []
    folder = Path(tempfile.mkdtemp(prefix="checksum-cost-"))
    try:
        for number in range(rounds + 1):
            names = list(FORMS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                path = folder / name / "step-1"
                shutil.rmtree(path.parent, ignore_errors=True)
                TimedFile.written_s = TimedFile.system_s = 0.0
                with FORMS[name]():
                    saved = measured(lambda path=path: save(path, tensors=tensors, state={}))  # type: ignore[misc]
                with FORMS[name]() if name == "digests" else without_digests():
                    loaded = measured(lambda path=path: load(path, tensors=tensors))  # type: ignore[misc]
                if number and name == "digests":
                    shares.append((TimedFile.written_s - TimedFile.system_s) / saved[0])
                if number:  # the first warms up
                    times["save"].setdefault(name, []).append(saved)
                    times["load"].setdefault(name, []).append(loaded)
    finally:
        shutil.rmtree(folder)
    medians = {
        operation: {
            f"{name}_{kind}": statistics.median(pair[index] for pair in pairs)
            for name, pairs in forms.items()
            for index, kind in enumerate(("s", "cpu_s"))
        }
        for operation, forms in times.items()
    }
    medians["save"]["share_s"] = statistics.median(shares)
    return medians


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"mib": arguments.mib, "rounds": arguments.rounds, "algorithm": checksums.ALGORITHM}
    result |= measure(arguments.mib, arguments.rounds)
    for operation in ("save", "load"):
        rows = result[operation]
        for base in ("crc32", "neither"):
            for kind in ("s", "cpu_s"):
                rows[f"digests_over_{base}_{kind}"] = rows[f"digests_{kind}"] / rows[f"{base}_{kind}"] - 1
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
