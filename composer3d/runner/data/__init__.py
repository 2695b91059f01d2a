"""The data of a run: sources, their order, and the batches of one data-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.runner.data.blend import counts_of
    from composer3d.runner.data.bpe import bpe_key, read_tokenizer, tokenizer_key
    from composer3d.runner.data.chats import probe_chats
    from composer3d.runner.data.collate import Batch
    from composer3d.runner.data.data_source import Source
    from composer3d.runner.data.data_table import DataTable
    from composer3d.runner.data.example import (
        example_of,
        first_samples,
        foreseen_batch,
        foreseen_example,
        unfilled_evaluation,
    )
    from composer3d.runner.data.inputs import Inputs, call_of, named_leaves
    from composer3d.runner.data.loader import Loader
    from composer3d.runner.data.paths import locate
    from composer3d.runner.data.prepare import prepare_once
    from composer3d.runner.data.source_kinds import open_source
    from composer3d.runner.data.stream import STREAM_LOSES
    from composer3d.runner.data.text import Text, python_docs
    from composer3d.runner.data.tokens import MappedTokens, held_out, map_token_file

_MODULES = {
    "blend": ("counts_of",),
    "bpe": ("bpe_key", "read_tokenizer", "tokenizer_key"),
    "chats": ("probe_chats",),
    "collate": ("Batch",),
    "data_source": ("Source",),
    "data_table": ("DataTable",),
    "example": ("example_of", "first_samples", "foreseen_batch", "foreseen_example", "unfilled_evaluation"),
    "inputs": ("Inputs", "call_of", "named_leaves"),
    "loader": ("Loader",),
    "source_kinds": ("open_source",),
    "paths": ("locate",),
    "prepare": ("prepare_once",),
    "stream": ("STREAM_LOSES",),
    "text": ("Text", "python_docs"),
    "tokens": ("MappedTokens", "held_out", "map_token_file"),
}

__all__ = [
    "Batch",
    "DataTable",
    "Inputs",
    "Loader",
    "MappedTokens",
    "STREAM_LOSES",
    "Source",
    "Text",
    "bpe_key",
    "call_of",
    "counts_of",
    "example_of",
    "first_samples",
    "foreseen_batch",
    "foreseen_example",
    "held_out",
    "locate",
    "map_token_file",
    "named_leaves",
    "open_source",
    "prepare_once",
    "probe_chats",
    "python_docs",
    "read_tokenizer",
    "tokenizer_key",
    "unfilled_evaluation",
]

__getattr__ = late_imports(__name__, _MODULES)
