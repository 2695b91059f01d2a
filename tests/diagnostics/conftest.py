from __future__ import annotations

from support.doctoring import folder, run

__all__ = ["folder", "run"]
