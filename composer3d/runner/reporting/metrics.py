"""`metrics.jsonl`: one JSON object a step, and the figures that are computed for it."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch

__all__ = ["MetricsFile", "peak_flops", "read_metrics"]

# Dense bfloat16 peaks from the makers' data sheets, in TFLOP/s; the first name that the device's name contains counts.
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("GH200", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("L4", 121.0),
)


class MetricsFile:
    """Appends rows to `metrics.jsonl`; one rank has it.

    Floats are written with the digits that read back as the same float, so two runs can be compared bit for bit; what
    is not finite becomes null, since JSON has no such number. Every row is written in one call: a kill
    leaves at most one row half written, and `keep` drops it.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def keep(self, num_steps: int) -> None:
        """Drop the rows of steps after `num_steps`, which a resumed run computes again; whole or not at all."""
        self.close()  # another file takes the place of the one that is open
        if not self._path.exists():
            return
        rows = list(read_metrics(self._path))
        kept = [row for row in rows if row["step"] <= num_steps]
        beside = self._path.with_name(f".{self._path.name}.tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(_line(row) for row in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)

    def last_step(self) -> int:
        """Return the last step that has a row, 0 without any; a row that was written by half is dropped."""
        if not self._path.exists():
            return 0
        last = max((row["step"] for row in read_metrics(self._path)), default=0)
        self.keep(last)
        return int(last)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            FileNotFoundError: The file is no longer where it was, so rows would be lost without a word.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._refuse_deleted(self._file.fileno())
        self._file.write(_line(row))
        self._file.flush()

    def _refuse_deleted(self, descriptor: int) -> None:
        there, own = os.stat(self._path), os.fstat(descriptor)
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise FileNotFoundError(errno.ENOENT, "Another file has taken its place", str(self._path))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `metrics.jsonl`, up to one that a kill left half written."""
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            return
        yield row


def _line(row: Mapping[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(finite) + "\n"


def peak_flops(device: torch.device) -> float | None:
    """Return the floating-point operations per second of a device's bfloat16 matrix products, None if not known.

    Args:
        device: Of this rank.
    """
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in PEAK_TFLOPS if known in name), None)
