"""What a failed, hung or slow run left: read, and told in a few lines."""

from __future__ import annotations

from composer3d.doctor.examining import Diagnosis, examine
from composer3d.doctor.reading import Evidence, Witness, read_evidence
from composer3d.doctor.replaying import replay

__all__ = ["Diagnosis", "Evidence", "Witness", "examine", "read_evidence", "replay"]
