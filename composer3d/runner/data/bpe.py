"""Text as tokens of the library `tokenizers`: of a tokenizer.json, or of a byte-level BPE trained on the text itself.

The same text and size give the same tokens on every machine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from composer3d.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["bpe_key", "read_meta", "read_tokenizer", "tokenizer_key", "write_bpe", "write_encoded"]

_PIECE_CHARACTERS = 1 << 20
_LARGEST_BYTES = 1 << 28  # those of models are at most a tenth of it


def bpe_key(text_sha256: str, vocab_size: int) -> str:
    """Return the cache's name for a tokenizer: the text, the size, and the library that trains it.

    Raises:
        DataError: The extra `bpe` is not installed.
    """
    return hashlib.sha256(f"{text_sha256} {vocab_size} tokenizers {_library('bpe')}".encode()).hexdigest()[:32]


def tokenizer_key(text_sha256: str, file: Path) -> str:
    """Return the cache's name for a text encoded by a tokenizer.json.

    Raises:
        DataError: The extra `bpe` is not installed, or the file is too large to be one.
    """
    _refuse_large(file)
    tokenizer = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashlib.sha256(f"{text_sha256} {tokenizer} tokenizers {_library(str(file))}".encode()).hexdigest()[:32]


def _library(tokenizer: str) -> str:
    try:
        return version("tokenizers")
    except PackageNotFoundError:
        raise DataError(
            f'[data] tokenizer = "{tokenizer}" needs the extra "bpe": pip install "composer3d[bpe]"; '
            'or set tokenizer = "bytes"'
        ) from None


def _refuse_large(file: Path) -> None:
    size = file.stat().st_size
    if size > _LARGEST_BYTES:
        raise DataError(
            f'[data] tokenizer = "{file}" has {size:,} bytes, and a tokenizer.json at most {_LARGEST_BYTES:,}'
        )


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, with truncation and padding off.

    Raises:
        DataError: The file is none.
    """
    from tokenizers import Tokenizer

    _refuse_large(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise DataError(f'[data] tokenizer = "{file}" cannot be read: {error}') from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_bpe(blocks: Callable[[], Iterable[bytes]], *, folder: Path, vocab_size: int) -> None:
    """Train a BPE, encode the text, and write both.

    Writes tokenizer.json (loadable by `tokenizers` and `transformers`), tokens.bin and, last, meta.json: a folder
    without it is half written and is written again. One thread; about 1 MB of text per second.

    Args:
        blocks: Gives the text from its beginning, each time it is called.
        folder: Where to write.
        vocab_size: Most tokens to train; a short text gives fewer.
    """
    with _one_thread():
        tokenizer = _train(_pieces(blocks()), vocab_size)
    write_encoded(blocks, folder=folder, tokenizer=tokenizer)


def write_encoded(blocks: Callable[[], Iterable[bytes]], *, folder: Path, tokenizer: Tokenizer) -> None:
    """Encode the text without special tokens, and write it and the tokenizer as `write_bpe` does.

    Args:
        blocks: Gives the text from its beginning.
        folder: Where to write.
        tokenizer: Of the library.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        size = tokenizer.get_vocab_size()
        dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        num_tokens = 0
        with (folder / "tokens.bin").open("wb") as file:
            for piece in _pieces(blocks()):
                tokens = np.array(tokenizer.encode(piece, add_special_tokens=False).ids, dtype=dtype)
                file.write(tokens.tobytes())
                num_tokens += tokens.size
    said = tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(said, encoding="utf-8")
    meta: dict[str, Any] = {"num_tokens": num_tokens, "vocab_size": size, "dtype": dtype.name}
    meta["tokenizer_sha256"] = hashlib.sha256(said.encode()).hexdigest()
    beside = folder / "meta.part"
    beside.write_text(json.dumps(meta))
    os.replace(beside, folder / "meta.json")


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return what `write_bpe` left behind, None where it is missing or the tokens are truncated."""
    if not (folder / "meta.json").exists():
        return None
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    size_bytes = (folder / "tokens.bin").stat().st_size
    return meta if size_bytes == meta["num_tokens"] * np.dtype(meta["dtype"]).itemsize else None


def _train(pieces: Iterator[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        # All 256 bytes, so that no text is unknown; sorted, because the library gives them in any order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield text in blocks that end at line ends: encoding a large document at once would need many times its size."""
    rest = ""
    for text in codecs.iterdecode(blocks, "utf-8"):
        rest += text
        while len(rest) >= _PIECE_CHARACTERS and (end := rest.rfind("\n", 0, _PIECE_CHARACTERS) + 1):
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep the library from starting its pool of threads: workers forked later would inherit a dead one."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
