"""Data source of a `[data]` table."""

from __future__ import annotations

import logging
from pathlib import Path

from composer3d.errors import DataError
from composer3d.runner.data.blend import open_blend
from composer3d.runner.data.chats import open_chats
from composer3d.runner.data.data_source import Report, Source
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.paths import locate
from composer3d.runner.data.stream import StreamSource
from composer3d.runner.data.synthetic import open_synthetic
from composer3d.runner.data.text import open_text
from composer3d.runner.data.tokens import open_token_files
from composer3d.runner.data.user_data import open_user

__all__ = ["open_source"]

log = logging.getLogger(__name__)


def open_source(
    table: DataTable, *, seed: int, folder: Path, cache: Path, report: Report | None = None, rank: int = 0
) -> Source | StreamSource:
    """Open what `[data] use` names.

    Args:
        table: The manifest's `[data]`.
        seed: Of the run; synthetic samples depend on it.
        folder: Of the manifest: paths and modules are looked up there.
        cache: A folder that the ranks of a node share, for tokenised text, trained tokenizers and locks.
        report: Takes messages: who prepares, who waits, which files are left out. Default: the log.
        rank: Of this process, for the messages.

    Raises:
        DataError: The source is missing, empty, too short, of another kind, or cannot do what `order` needs.
    """
    report = report or log.info
    if table.blend:
        parts = [
            open_source(part, seed=seed, folder=folder, cache=cache, report=report, rank=rank) for part in table.sources
        ]
        numbered = [part for part in parts if isinstance(part, Source)]
        stated = [each.weight for each in table.blend if each.weight is not None]
        return open_blend(numbered, stated or [float(len(part)) for part in numbered])
    if table.kind == "synthetic":
        return open_synthetic(table, seed=seed)
    if table.kind == "user":
        return open_user(table, folder=folder, cache=cache, report=report, rank=rank)
    if table.kind == "python_docs":
        return open_text(None, table, cache=cache, report=report, rank=rank)
    located = locate(table.use, folder=folder, report=report)
    if table.kind == "chat":
        return open_chats(located.files, table, folder=folder, cache=cache, report=report, rank=rank)
    if located.kind == "text":
        if table.dtype is not None:
            raise DataError(f'[data] dtype is for token files, and use = "{table.use}" is text; remove it')
        return open_text(located.files, table, cache=cache, report=report, rank=rank)
    if table.tokenizer == "bpe":
        raise DataError(f'[data] tokenizer = "bpe" is for text, and use = "{table.use}" holds tokens; remove it')
    return open_token_files(located.files, table)
