"""Parts of what takes long: another one each day, by the number of the day.

The fast tests take a part of matrices and of random input each day. Of the slow tests `pytest -m slow --daily` runs
those of the day, and within NUM_PARTS days in a row every one of them.
"""

from __future__ import annotations

import os
import zlib
from datetime import UTC, datetime

__all__ = ["NUM_PARTS", "PART", "header", "is_of_day"]

NUM_PARTS = 28
PART = int(os.environ.get("COMPOSER3D_MATRIX_PART", datetime.now(UTC).toordinal()))


def is_of_day(scope: str, day: int = PART) -> bool:
    """Return whether slow tests are those of a day: by a checksum, so that a new test moves no other one.

    Args:
        scope: Node of a test, or file whose tests stay together.
        day: Its number.
    """
    return zlib.crc32(scope.encode()) % NUM_PARTS == day % NUM_PARTS


def header(day: int = PART) -> str:
    """Return the line that names the part that runs, and the command that repeats it."""
    return f"slow tests: part {day % NUM_PARTS + 1} of {NUM_PARTS}, that of COMPOSER3D_MATRIX_PART={day}"
