"""Megatron-LM's indexed data sets: tokens in PREFIX.bin, their dtype and their documents in PREFIX.idx."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.errors import DataError

__all__ = ["INDEX_SUFFIX", "TokenIndex", "index_of", "read_index"]

INDEX_SUFFIX = ".idx"
_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, dtype, number of sequences, number of document boundaries.
_HEADER = struct.Struct("<9sQBQQ")
# Codes of the format's integer dtypes; 6 and 7 are floats.
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Index (.idx) of the tokens in a .bin file.

    Args:
        dtype: Of one token.
        num_tokens: Tokens of all sequences.
        num_documents: Documents, each of one or more sequences.
    """

    dtype: np.dtype[Any]
    num_tokens: int
    num_documents: int


def index_of(path: Path) -> Path | None:
    """Return the index of a .bin file; None where none lies beside it."""
    beside = path.with_suffix(INDEX_SUFFIX)
    return beside if path.suffix == ".bin" and beside.is_file() else None


def read_index(path: Path, *, use: str) -> TokenIndex:
    """Read an index, and compare it with the .bin file beside it.

    Args:
        path: Of the .idx file.
        use: As the manifest names it, for messages.

    Raises:
        DataError: It is no such index, is truncated, or does not describe that file.

    Memory: 12 bytes a sequence, for a moment.
    """
    what, tokens = f'[data] use = "{use}": {path.name}', path.with_suffix(".bin")
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise DataError(f"{what} is no index of Megatron-LM's (MMIDIDX); move it away, or write the data set again")
        _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
        if version != 1 or code not in _DTYPES:
            raise DataError(f"{what} has version {version} and dtype {code}; version 1 of integers can be read")
        rest = 12 * num_sequences + 8 * num_boundaries
        if path.stat().st_size < _HEADER.size + rest:
            raise DataError(f"{what} is truncated: {num_sequences} sequences need {_HEADER.size + rest} bytes")
        lengths = np.fromfile(file, dtype="<i4", count=num_sequences).astype(np.int64)
        pointers = np.fromfile(file, dtype="<i8", count=num_sequences)
    dtype = np.dtype(_DTYPES[code])
    ends = np.cumsum(lengths)
    if num_sequences and (lengths.min() < 0 or not np.array_equal(pointers, (ends - lengths) * dtype.itemsize)):
        raise DataError(f"{what} names sequences that do not follow each other in {tokens.name}; write it again")
    num_tokens, size = int(ends[-1]) if num_sequences else 0, tokens.stat().st_size
    if num_tokens * dtype.itemsize != size:
        raise DataError(
            f"{what} says {num_tokens} tokens of {dtype}, and {tokens.name} has {size} bytes; they are of two data sets"
        )
    return TokenIndex(dtype=dtype, num_tokens=num_tokens, num_documents=max(num_boundaries - 1, 0))
