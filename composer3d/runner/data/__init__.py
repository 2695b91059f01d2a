"""The data of a run: sources, their order, and the batches of one data-parallel rank."""

from __future__ import annotations

from composer3d.runner.data.collate import Batch
from composer3d.runner.data.data_source import Source
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.example import example_of, foreseen_batch, foreseen_example
from composer3d.runner.data.loader import Loader
from composer3d.runner.data.open_source import open_source
from composer3d.runner.data.paths import locate
from composer3d.runner.data.prepare import prepare_once
from composer3d.runner.data.stream import STREAM_LOSES

__all__ = [
    "STREAM_LOSES",
    "Batch",
    "DataTable",
    "Loader",
    "Source",
    "example_of",
    "foreseen_batch",
    "foreseen_example",
    "locate",
    "open_source",
    "prepare_once",
]
