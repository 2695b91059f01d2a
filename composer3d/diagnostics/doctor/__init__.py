"""Diagnosis of a failed, hung or slow run in a few lines, from the files in its folder."""

from __future__ import annotations

from composer3d.diagnostics.doctor.examine import Diagnosis, examine
from composer3d.diagnostics.doctor.replay_step import replay, replayed
from composer3d.diagnostics.doctor.run_folder import Evidence, Witness, read_evidence

__all__ = [
    "Diagnosis",
    "Evidence",
    "Witness",
    "examine",
    "read_evidence",
    "replay",
    "replayed",
]
