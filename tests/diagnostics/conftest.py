from __future__ import annotations

from support.doctor_cases import folder, run

__all__ = ["folder", "run"]
