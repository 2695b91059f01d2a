"""Text as tokens: the reference text inside Python, a file, or a folder; bytes, or a BPE trained on it."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.errors import DataError
from composer3d.runner.data.bpe import (
    bpe_key,
    read_meta,
    read_tokenizer,
    tokenizer_key,
    write_bpe,
    write_encoded,
)
from composer3d.runner.data.data_source import Report
from composer3d.runner.data.data_table import DataTable
from composer3d.runner.data.prepare import prepare_once
from composer3d.runner.data.tokens import MappedTokens, TokenSource, held_out

__all__ = ["Text", "open_text", "python_docs"]

_BLOCK_BYTES = 1 << 20
_NUM_BYTES = 256
_SEPARATOR = b"\n\n"
_DEFAULT_BPE = 4096


class Text:
    """UTF-8 text in blocks, read again in each iteration and never held whole.

    Args:
        parts: What opens each document, with its name.
        use: As the manifest names it.
    """

    def __init__(self, parts: dict[str, Callable[[], Iterator[bytes]]], *, use: str) -> None:
        self._parts, self.use = parts, use
        self.sha256, self.num_bytes = self._scan()

    @classmethod
    def from_files(cls, files: tuple[Path, ...], *, use: str) -> Text:
        """Return the text of files, in their order, with an empty line between them."""
        return cls({file.name if len(files) == 1 else str(file): _reader(file) for file in files}, use=use)

    @classmethod
    def from_bytes(cls, text: bytes, *, use: str) -> Text:
        """Return text from memory."""
        return cls({use: lambda: iter([text])}, use=use)

    def blocks(self) -> Iterator[bytes]:
        """Yield the text in order."""
        for number, read in enumerate(self._parts.values()):
            if number:
                yield _SEPARATOR
            yield from read()

    def _scan(self) -> tuple[str, int]:
        """Hash the text once, and look whether it is text.

        Raises:
            DataError: A document is binary or not UTF-8, or there is no text at all.
        """
        digest, num_bytes = hashlib.sha256(), 0
        for number, (name, read) in enumerate(self._parts.items()):
            if number:
                digest.update(_SEPARATOR)
            for block in _checked(read(), name=Path(name).name, use=self.use):
                digest.update(block)
                num_bytes += len(block)
        if num_bytes == 0:
            what = "is empty" if len(self._parts) == 1 else f"holds {len(self._parts)} files, and all are empty"
            raise DataError(f'[data] use = "{self.use}" {what}; give text')
        return digest.hexdigest(), num_bytes + len(_SEPARATOR) * (len(self._parts) - 1)


def _reader(path: Path) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    return read


def _checked(blocks: Iterator[bytes], *, name: str, use: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    for block in blocks:
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            raise DataError(_not_text(use, name, block, start - pending + error.start)) from None
        if (zero := block.find(0)) >= 0:
            raise DataError(_not_text(use, name, block, start + zero))
        start += len(block)
        yield block
    if pending_bytes := decoder.getstate()[0]:
        raise DataError(_not_text(use, name, b"", start - len(pending_bytes)))


def _not_text(use: str, name: str, block: bytes, place: int) -> str:
    kind = "is binary" if 0 in block else "is not UTF-8"
    return (
        f'[data] use = "{use}": {name} {kind} (at byte {place}); convert it to UTF-8 text, take it out, or give tokens '
        "as .npy or .bin"
    )


def python_docs() -> bytes:
    """Return the reference text that ships inside Python: every topic of `help()`, sorted by name.

    About 465,000 characters of English; it differs between versions of Python, so its sha256 is recorded.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def open_text(
    files: tuple[Path, ...] | None, table: DataTable, *, cache: Path, report: Report, rank: int = 0
) -> TokenSource:
    """Open text as next-token sequences.

    One file as bytes is mapped as it is; a folder, and any text as BPE, is tokenised once per node into the cache,
    under the digest of the text.

    Args:
        files: The documents; None is the text inside Python.
        table: The manifest's `[data]`.
        cache: Folder for tokenised text and trained tokenizers.
        report: Called with a line for the user before work that takes long.
        rank: Of this process, for the messages.

    Raises:
        DataError: A file is empty or no text, there is less than one sequence, or an extra is missing.
    """
    literal = b"" if files else python_docs()
    text = Text.from_files(files, use=table.use) if files else Text.from_bytes(literal, use=table.use)
    facts: dict[str, Any] = {"kind": "text", "use": table.use, "sha256": text.sha256, "num_bytes": text.num_bytes}
    if table.tokenizer == "bpe" or table.has_file:
        array, meta = _encoded(text, table, cache=cache, report=report, rank=rank)
        kind = "file" if table.has_file else "bpe"
        facts |= {"tokenizer": kind, "tokenizer_sha256": meta["tokenizer_sha256"]}
        return held_out([array], table, vocab_size=meta["vocab_size"], facts=facts)
    if table.vocab_size not in (None, _NUM_BYTES):
        raise DataError(
            f'[data] tokenizer = "bytes" has {_NUM_BYTES} tokens; remove vocab_size = {table.vocab_size}, or set '
            'tokenizer = "bpe"'
        )
    facts["tokenizer"] = "bytes"
    if not files:
        return held_out([np.frombuffer(literal, np.uint8)], table, vocab_size=_NUM_BYTES, facts=facts)
    path = files[0] if len(files) == 1 else _joined(text, cache=cache, report=report, rank=rank)
    mapped = MappedTokens(path, dtype=np.dtype(np.uint8), size=text.num_bytes)
    return held_out([mapped], table, vocab_size=_NUM_BYTES, facts=facts)


def _joined(text: Text, *, cache: Path, report: Report, rank: int) -> Path:
    """Return one file with all the text, made once per node."""
    path = cache / f"text-{text.sha256[:32]}.bin"

    def write() -> None:
        beside = path.with_suffix(".part")
        with beside.open("wb") as file:
            file.writelines(text.blocks())
        os.replace(beside, path)

    what = f'the text of "{text.use}"'
    prepare_once(
        write,
        done=lambda: path.exists() and path.stat().st_size == text.num_bytes,
        lock_path=path.with_suffix(".lock"),
        what=what,
        report=report,
        rank=rank,
    )
    return path


def _encoded(
    text: Text, table: DataTable, *, cache: Path, report: Report, rank: int
) -> tuple[MappedTokens, dict[str, Any]]:
    """Return the text as tokens and what is known about them, encoded once per node, for `bpe` after training."""
    if table.has_file:
        file = Path(table.tokenizer or "")
        folder = cache / f"tokens-{tokenizer_key(text.sha256, file)}"
        what = f'the tokens of "{text.use}"'
    else:
        folder = cache / f"bpe-{bpe_key(text.sha256, table.vocab_size or _DEFAULT_BPE)}"
        what = f'the tokenizer of "{text.use}"'

    def write() -> None:
        if table.has_file:
            write_encoded(text.blocks, folder=folder, tokenizer=read_tokenizer(file))
        else:
            write_bpe(text.blocks, folder=folder, vocab_size=table.vocab_size or _DEFAULT_BPE)

    prepare_once(
        write,
        done=lambda: read_meta(folder) is not None,
        lock_path=folder.with_suffix(".lock"),
        what=what,
        report=report,
        rank=rank,
    )
    meta = read_meta(folder)
    assert meta is not None
    return MappedTokens(folder / "tokens.bin", dtype=np.dtype(meta["dtype"]), size=meta["num_tokens"]), meta
