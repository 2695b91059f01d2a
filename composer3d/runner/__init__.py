"""The manifest run: ranks started and watched, data, optimizer and the training loop, on composer3d's public names."""

from __future__ import annotations

from composer3d.runner.runner_tables import TABLES
from composer3d.runner.trainer import Outcome, output_folder, train

__all__ = ["TABLES", "Outcome", "output_folder", "train"]
