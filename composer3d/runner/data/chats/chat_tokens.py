"""Chats as tokens, written once per node: tokens, which of them are trained, and where each chat ends."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer3d.errors import DataError
from composer3d.runner.data.bpe import read_tokenizer, tokenizer_key
from composer3d.runner.data.chats.chat_records import read_records
from composer3d.runner.data.chats.chat_spans import byte_offsets, rendered, trained_tokens
from composer3d.runner.data.chats.chat_template import ChatTemplate, RenderingError, read_template
from composer3d.runner.data.data_source import Report
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.prepare import prepare_once
from composer3d.runner.data.tokens import MappedTokens

__all__ = ["ChatTokens", "chat_tokens", "tokenised"]

_FORMAT = 1  # of the files in the cache
Encode = Callable[[str], tuple[Sequence[int], Sequence[tuple[int, int]]]]


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """All chats of some files.

    Args:
        tokens: One chat after the other.
        is_trained: 1 where a token is trained.
        ends: Where each chat ends.
        vocab_size: Every token is below it.
        facts: What the record says of them.
    """

    tokens: MappedTokens
    is_trained: MappedTokens
    ends: NDArray[np.int64]
    vocab_size: int
    facts: dict[str, Any]

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens of each chat."""
        return np.diff(self.ends, prepend=0)

    def of(self, chat: int, most: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first tokens of a chat, and which are trained."""
        start = int(self.ends[chat - 1]) if chat else 0
        part = slice(start, min(int(self.ends[chat]), start + most))
        return self.tokens[part].astype(np.int64), self.is_trained[part].astype(np.bool_)


def chat_tokens(
    files: Sequence[Path], table: DataTable, *, folder: Path, cache: Path, report: Report, rank: int = 0
) -> ChatTokens:
    """Return the tokens of chats, encoded once per node into the cache.

    Raises:
        DataError: A record, the template or the tokenizer cannot be used.
    """
    chat = table.chat
    assert chat is not None
    path = Path(table.tokenizer) if table.tokenizer is not None and table.has_file else None
    template = read_template(chat.template, folder=folder, tokenizer=path)
    digest = hashlib.sha256(f"chats {_FORMAT} {chat!r}".encode())
    for file in files:
        digest.update(file.read_bytes())
    facts: dict[str, Any] = {"kind": "chats", "use": table.use, "sha256": digest.hexdigest(), "trained": chat.trained}
    if template is not None:
        stated = json.dumps([template.text, dict(template.special)], sort_keys=True)
        facts["template_sha256"] = hashlib.sha256(stated.encode()).hexdigest()
    key = f"{facts['sha256']} {facts.get('template_sha256')}"
    key = tokenizer_key(key, path) if path is not None else hashlib.sha256(key.encode()).hexdigest()[:32]
    place = cache / f"chats-{key}"
    prepare_once(
        lambda: _write(tokenised(files, table, template, path), place),
        done=(place / "meta.json").exists,
        lock_path=place.with_suffix(".lock"),
        what=f'the chats of "{table.use}"',
        report=report,
        rank=rank,
    )
    return _opened(place, path, facts)


def _opened(place: Path, path: Path | None, facts: dict[str, Any]) -> ChatTokens:
    meta = json.loads((place / "meta.json").read_text())
    size = 256
    if path is not None:
        size = max(read_tokenizer(path).get_vocab(with_added_tokens=True).values(), default=-1) + 1
        facts["tokenizer_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    facts |= {"tokenizer": "file" if path is not None else "bytes", **meta}
    return ChatTokens(
        tokens=MappedTokens(place / "tokens.bin", dtype=np.dtype(np.uint32), size=meta["num_tokens"]),
        is_trained=MappedTokens(place / "trained.bin", dtype=np.dtype(np.uint8), size=meta["num_tokens"]),
        ends=np.load(place / "ends.npy"),
        vocab_size=size,
        facts=facts,
    )


def tokenised(
    files: Sequence[Path], table: DataTable, template: ChatTemplate | None, tokenizer: Path | None
) -> Iterator[tuple[Sequence[int], list[bool]]]:
    """Yield the tokens of each chat, and which are trained, in the order of the files.

    Raises:
        DataError: Of a record, with its file and line.
    """
    chat = table.chat
    assert chat is not None
    render = None if template is None or template.text is None else template.compiled()
    end = "" if template is None else template.special.get("eos_token", "")
    encode = _encoder(tokenizer)
    for record in read_records(files, chat, use=table.use):
        try:
            text, spans = rendered(record, render, trained=chat.trained, end=end)
        except RenderingError as error:
            raise DataError(f'[data] use = "{table.use}": {record.place} {error}') from None
        ids, offsets = encode(text)
        if len(ids) < 2:
            raise DataError(f'[data] use = "{table.use}": {record.place} has {len(ids)} tokens, and needs 2')
        yield ids, trained_tokens(offsets, spans)


def _encoder(tokenizer: Path | None) -> Encode:
    if tokenizer is None:
        return lambda text: (list(text.encode()), byte_offsets(text))
    found = read_tokenizer(tokenizer)

    def encode(text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        # The template writes the special tokens itself.
        encoded = found.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    return encode


def _write(chats: Iterator[tuple[Sequence[int], list[bool]]], place: Path) -> None:
    """Write chats; meta.json last, so that a folder without it is half written."""
    place.mkdir(parents=True, exist_ok=True)
    ends, num_trained = [0], 0
    with (place / "tokens.bin").open("wb") as tokens, (place / "trained.bin").open("wb") as trained:
        for ids, is_trained in chats:
            tokens.write(np.array(ids, dtype=np.uint32).tobytes())
            trained.write(np.array(is_trained, dtype=np.uint8).tobytes())
            ends.append(ends[-1] + len(ids))
            num_trained += sum(is_trained)
    np.save(place / "ends.npy", np.array(ends[1:], dtype=np.int64))
    beside = place / "meta.part"
    beside.write_text(json.dumps({"num_tokens": ends[-1], "num_chats": len(ends) - 1, "num_trained": num_trained}))
    os.replace(beside, place / "meta.json")
