"""Bandwidth of optimizer state on disk, beside what the disk gives: steps of AdamW, and a probe, in turns.

One process, one thread of computation, a model of matrices of 2048 x 2048. A step of `sharding.nvme_offload` reads and
writes both moments of every parameter while it steps them. The probe reads and writes a file of the same size with
O_DIRECT in requests of the same size, as many at once by as many threads, as many pieces ahead, and computes nothing.
They take turns, because what else uses the disk changes; told is the median of the turns' ratios.

offload: the goal is 80 % of the probe.

Usage: python benchmarks/offload.py [--millions 100] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from harness import conditions, fail, note, say

GOAL = 0.8
DIM = 2048
MIB = 2**20


class Probe:
    """A file of two moments, read and written in pieces of two requests each."""

    def __init__(self, folder: Path, *, num_pieces: int, chunk_bytes: int, depth: int, threads: int) -> None:
        try:
            self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            fail(f"{folder}: no O_DIRECT there ({error.strerror}), so there is nothing to compare with; see --folder")
        self._chunk_bytes, self._num_pieces, self._depth = chunk_bytes, num_pieces, depth
        os.posix_fallocate(self._fd, 0, self.num_bytes)
        self._buffers = [mmap.mmap(-1, 2 * chunk_bytes) for _ in range(2 * depth + 1)]
        self._workers = ThreadPoolExecutor(threads)
        self.turn()  # the first writes of a file give its blocks their place

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return 2 * self._num_pieces * self._chunk_bytes

    def turn(self) -> float:
        """Read and write everything once; return bytes a second."""
        begin_s = time.perf_counter()
        free, reads = deque(self._buffers), deque[tuple[int, Any, list[Future[int]]]]()
        writes: deque[tuple[Any, list[Future[int]]]] = deque()
        issued = 0
        for _ in range(self._num_pieces):
            while issued < self._num_pieces and len(reads) <= self._depth:
                if not free:
                    buffer, requests = writes.popleft()
                    self._finish(requests)
                    free.append(buffer)
                buffer = free.popleft()
                reads.append((issued, buffer, self._submit(os.preadv, buffer, issued)))
                issued += 1
            piece, buffer, requests = reads.popleft()
            self._finish(requests)
            writes.append((buffer, self._submit(os.pwritev, buffer, piece)))
        for _, requests in writes:
            self._finish(requests)
        return 2 * self.num_bytes / (time.perf_counter() - begin_s)

    def _submit(self, call: Any, buffer: mmap.mmap, piece: int) -> list[Future[int]]:
        size, memory = self._chunk_bytes, memoryview(buffer)
        places = [(half * size, (2 * piece + half) * size) for half in (0, 1)]
        return [self._workers.submit(call, self._fd, [memory[at : at + size]], offset) for at, offset in places]

    def _finish(self, requests: list[Future[int]]) -> None:
        for request in requests:
            if request.result() != self._chunk_bytes:
                fail("the probe's file gave fewer bytes than it was asked for")


def steps(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Yield the bytes a second and the seconds of one optimizer step after the other."""
    import torch
    from torch import nn

    import composer3d

    num_matrices = max(round(arguments.millions * 1e6 / DIM**2), 1)
    with torch.device("meta"):
        model: nn.Module = nn.ParameterList(nn.Parameter(torch.empty(DIM, DIM)) for _ in range(num_matrices))
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
        parameter.grad = torch.full_like(parameter, 1e-3)
    manifest = folder / "offload.toml"
    manifest.write_text(
        "composer3d = 1\n[sharding.nvme_offload]\n"
        f"folder = {json.dumps(str(folder))}\nchunk_mib = {arguments.chunk_mib}\n"
        f"depth = {arguments.depth}\nthreads = {arguments.threads}\n"
    )
    with composer3d.compose(model, manifest, loss_fn=lambda output, target: output) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
        before, number = 0.0, 0
        while True:
            with run.step(number):
                begin_s = time.perf_counter()
                optimizer.step()
                taken_s = time.perf_counter() - begin_s
            metrics = run.report(number, {})
            moved = metrics["nvme_read_bytes"] + metrics["nvme_written_bytes"]
            if number:  # the first step makes the moments
                yield (moved - before) / taken_s, taken_s
            before, number = moved, number + 1


def main() -> None:
    """Read the command line, measure, print; exit code 1 below the goal."""
    parser = argparse.ArgumentParser(description="Measure optimizer state on disk against the disk.")
    parser.add_argument("--millions", type=float, default=100.0, help="parameters, millions; default 100")
    parser.add_argument("--turns", type=int, default=7, help="pairs of a step and a probe; default 7")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder's")
    parser.add_argument("--chunk-mib", type=float, default=16.0, help="of one request; default 16")
    parser.add_argument("--depth", type=int, default=3, help="pieces ahead; default 3")
    parser.add_argument("--threads", type=int, default=4, help="requests at once; default 4")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = conditions()
    rows: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        chunk_bytes = int(arguments.chunk_mib * MIB) // 4096 * 4096
        measured = steps(Path(name), arguments)
        next(measured)
        num_pieces = max(round(arguments.millions * 4e6 / chunk_bytes), 1)
        probe = Probe(
            Path(name),
            num_pieces=num_pieces,
            chunk_bytes=chunk_bytes,
            depth=arguments.depth,
            threads=arguments.threads,
        )
        for turn in range(arguments.turns):
            before = probe.turn()
            moved, taken_s = next(measured)
            # Of the probes around a step, because the disk's rate drifts.
            rate = 2 / (1 / before + 1 / probe.turn())
            rows.append((moved, rate, taken_s))
            note(f"turn {turn}: {moved / MIB:.0f} MiB/s in {taken_s:.2f} s, probe {rate / MIB:.0f} MiB/s")
        measured.close()
    ratio = statistics.median(moved / rate for moved, rate, _ in rows)
    row = {
        "name": "nvme_offload",
        "million_parameters": arguments.millions,
        "mib_per_s": round(statistics.median(moved for moved, _, _ in rows) / MIB),
        "probe_mib_per_s": round(statistics.median(rate for _, rate, _ in rows) / MIB),
        "ratio": round(ratio, 3),
        "ratios": [round(moved / rate, 3) for moved, rate, _ in rows],
        "step_s": round(statistics.median(taken_s for *_, taken_s in rows), 2),
        "goal": GOAL,
        "chunk_mib": arguments.chunk_mib,
        "depth": arguments.depth,
        "threads": arguments.threads,
    }
    if arguments.json:
        found["load_1min_after"] = round(os.getloadavg()[0], 2)
        say(json.dumps({"rows": [row], "conditions": found}, indent=1))
    else:
        say(
            f"optimizer state on disk: {row['mib_per_s']} MiB/s, the disk {row['probe_mib_per_s']} MiB/s: ratio "
            f"{row['ratio']} (goal {GOAL}); a step of {arguments.millions:g} million parameters {row['step_s']} s"
        )
    raise SystemExit(1 if ratio < GOAL else 0)


if __name__ == "__main__":
    main()
