"""Parts of what takes long: the fast tests take another one each day, by the number of the day."""

from __future__ import annotations

import os
from datetime import UTC, datetime

__all__ = ["PART"]

PART = int(os.environ.get("COMPOSER3D_MATRIX_PART", datetime.now(UTC).toordinal()))
