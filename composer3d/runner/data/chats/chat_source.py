"""Chats as a source of samples: one a row, or several with what separates them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer3d.errors import DataError
from composer3d.runner.data.chats.chat_packing import Rows, packed, unpacked
from composer3d.runner.data.chats.chat_template import read_template
from composer3d.runner.data.chats.chat_tokens import ChatTokens, chat_tokens, tokenised
from composer3d.runner.data.data_source import IGNORED, Report, Sample, Source, num_held_out
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.documents import with_documents

__all__ = ["ChatSource", "open_chats", "probe_chats"]

_NUM_PROBED = 8


class ChatSource(Source):
    """Rows of chats: targets are the next tokens, where they are trained; no chat is the target of another.

    Args:
        chats: As tokens.
        rows: Which of them each row holds.
        table: The manifest's `[data]`.
        num_left_out: Chats that are too long and are in no row.
        evaluation: The rows held out.
    """

    def __init__(
        self,
        chats: ChatTokens,
        rows: Rows,
        table: DataTable,
        *,
        num_left_out: int = 0,
        evaluation: Source | None = None,
    ) -> None:
        super().__init__(vocab_size=chats.vocab_size, evaluation=evaluation)
        self._chats, self._rows, self._table, self._num_left_out = chats, rows, table, num_left_out

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each row."""
        if self._table.packs:
            return np.full(len(self), self._table.seq_len, dtype=np.int64)
        return np.minimum(self._chats.num_tokens[self._rows.chats] - 1, self._table.seq_len)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        seq_len, documents = self._table.seq_len, self._table.told
        tokens, targets, firsts = [], [], []
        for chat in self._rows.of(index).tolist():
            ids, is_trained = self._chats.of(chat, seq_len + 1)
            tokens.append(ids[:-1])
            targets.append(np.where(is_trained[1:], ids[1:], IGNORED))
            firsts.append(np.arange(len(ids) - 1) == 0)
        if self._table.packs and (missing := seq_len - sum(map(len, tokens))):
            # What fills a row up is a document of its own, without loss.
            tokens.append(np.full(missing, self._table.pad_id))
            targets.append(np.full(missing, IGNORED))
            firsts.append(np.arange(missing) == 0)
        row, wanted, starts = (torch.from_numpy(np.concatenate(parts)) for parts in (tokens, targets, firsts))
        return with_documents(row, wanted, firsts_S=starts, table=documents) if documents else (row, wanted)

    def record(self) -> dict[str, Any]:
        """Return the facts about the chats and the counts."""
        return {
            **self._chats.facts,
            "seq_len": self._table.seq_len,
            "is_packed": self._table.packs,
            "num_left_out": self._num_left_out,
            "num_samples": len(self),
            "num_evaluation_samples": len(self.evaluation) if self.evaluation is not None else 0,
            "vocab_size": self.vocab_size,
        }


def open_chats(
    files: Sequence[Path], table: DataTable, *, folder: Path, cache: Path, report: Report, rank: int = 0
) -> ChatSource:
    """Open files of instruction data; the last chats are held out for evaluation.

    Args:
        files: .jsonl or .json.
        table: The manifest's `[data]`, with `chat`.
        folder: Of the manifest, where a template is looked for.
        cache: Folder for the tokens.
        report: Takes a line on chats that are left out or truncated.
        rank: Of this process, for the messages.

    Raises:
        DataError: A record cannot be used, nothing is trained, or a chat is too long and `too_long` is "refuse".
    """
    chats = chat_tokens(files, table, folder=folder, cache=cache, report=report, rank=rank)
    what = f'[data] use = "{table.use}"'
    if not len(chats.ends):
        raise DataError(f"{what} holds no chats")
    if not chats.facts["num_trained"]:
        raise DataError(f"{what}: no chat has a turn of the assistant, so nothing is trained; mend the roles")
    kept = _of_length(chats, table, report)
    num_evaluation = num_held_out(len(kept), table.evaluation_fraction)
    num_left_out, split = len(chats.ends) - len(kept), len(kept) - num_evaluation
    held = ChatSource(chats, _rows(kept[split:], chats, table), table) if num_evaluation else None
    rows = _rows(kept[:split], chats, table)
    return ChatSource(chats, rows, table, num_left_out=num_left_out, evaluation=held)


def _of_length(chats: ChatTokens, table: DataTable, report: Report) -> NDArray[np.int64]:
    """Return the chats that are used, by what `too_long` says of those above seq_len."""
    assert table.chat is not None
    is_long = chats.num_tokens - 1 > table.seq_len
    count, total = int(is_long.sum()), len(is_long)
    if not count:
        return np.arange(total)
    what = f'[data] use = "{table.use}": {count} of {total} chats are longer than seq_len = {table.seq_len}'
    if table.chat.too_long == "refuse":
        longest = int(chats.num_tokens.max()) - 1
        raise DataError(f'{what} (the longest has {longest}); raise it, or set chat.too_long = "drop" or "truncate"')
    report(f"{what}; they are {'left out' if table.chat.too_long == 'drop' else 'truncated'}")
    if table.chat.too_long == "truncate":
        return np.arange(total)
    if count == total:
        raise DataError(f"{what}, so none is left; raise it")
    return np.flatnonzero(~is_long)


def _rows(kept: NDArray[np.int64], chats: ChatTokens, table: DataTable) -> Rows:
    if not table.packs:
        return unpacked(kept)
    lengths = np.minimum(chats.num_tokens[kept] - 1, table.seq_len)
    return packed(kept, lengths, width=table.seq_len)


def probe_chats(files: Sequence[Path], table: DataTable, *, folder: Path) -> None:
    """Render and encode the first chats, writing nothing.

    Raises:
        DataError: As `open_chats`, of what the first chats and the template show.
    """
    assert table.chat is not None
    path = Path(table.tokenizer) if table.tokenizer is not None and table.has_file else None
    template = read_template(table.chat.template, folder=folder, tokenizer=path)
    if not list(islice(tokenised(files, table, template, path), _NUM_PROBED)):
        raise DataError(f'[data] use = "{table.use}" holds no chats')
