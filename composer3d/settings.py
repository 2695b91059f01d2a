"""Validation settings of every typed table, of the manifest or of a plugin."""

from __future__ import annotations

from pydantic import ConfigDict

__all__ = ["TABLE_CONFIG"]

TABLE_CONFIG = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
