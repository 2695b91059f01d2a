"""Sequences of tokens: from memory, or from files of tokens that are mapped and never read whole."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer3d.errors import DataError
from composer3d.runner.data.data_source import Sample, Source, num_held_out
from composer3d.runner.data.data_table import DataTable, DocumentsTable
from composer3d.runner.data.documents import divided_at_ends
from composer3d.runner.data.indexed_tokens import index_of, read_index
from composer3d.runner.data.token_digest import file_facts

__all__ = ["TOKEN_SUFFIXES", "MappedTokens", "TokenSource", "held_out", "map_token_file", "open_token_files"]

TOKEN_SUFFIXES = (".bin", ".npy")
_READS_BETWEEN_LOOKS = 64
# What is looked at to know a wrong dtype: so many stretches over the file, of so many tokens.
_NUM_STRETCHES, _STRETCH = 64, 1024
# No vocabulary is that large; half of all tokens above it are no tokens.
_LARGEST_VOCABULARY = 1 << 24


class MappedTokens:
    """A file of tokens, mapped when it is first used; only the pages that samples touch are read.

    A worker that receives it maps the file again: a pickled `numpy.memmap` would carry the whole file.

    Args:
        path: Of the file: a header, if any, and tokens of one dtype.
        dtype: Of one token.
        size: Number of tokens.
        offset: Bytes before the first token.
    """

    def __init__(self, path: Path, *, dtype: np.dtype[Any], size: int, offset: int = 0) -> None:
        self.path, self.dtype, self.size, self.offset = path, dtype, size, offset
        self._map: np.memmap[Any, np.dtype[Any]] | None = None
        self._opened, self._num_reads = self._state(), 0

    @property
    def modified_ns(self) -> int:
        """When the file was last changed before it was opened, in nanoseconds since 1970."""
        return self._opened[1]

    def _state(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> NDArray[Any]:
        if self._map is None:
            self._map = np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.size,))
        if self._num_reads % _READS_BETWEEN_LOOKS == 0 and self._state() != self._opened:
            raise DataError(
                f"[data] {self.path.name} was changed while the run reads it, so its samples are others than those of "
                "the steps before; write new data to a new file, and go on from the last checkpoint with the old one"
            )
        self._num_reads += 1
        return self._map[part]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}


class TokenSource(Source):
    """Sequence i holds the tokens i * seq_len and on; its targets are the same tokens one place later.

    Sequences do not cross from one array into the next; up to seq_len tokens at the end of each array are not used.

    Args:
        arrays: Token ids, 1-D each, in memory or mapped.
        seq_len: Tokens per sequence.
        vocab_size: Every token is below it.
        facts: What the record says of the tokens.
        first: The first sequence of this source.
        num_samples: How many sequences; default all.
        evaluation: The sequences held out.
        documents: What the model is told of documents in a sequence; None is nothing.
    """

    def __init__(
        self,
        arrays: Sequence[NDArray[Any] | MappedTokens],
        *,
        seq_len: int,
        vocab_size: int | None,
        facts: Mapping[str, Any],
        first: int = 0,
        num_samples: int | None = None,
        evaluation: Source | None = None,
        documents: DocumentsTable | None = None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, evaluation=evaluation)
        self._documents = documents
        self._arrays, self._seq_len, self._facts, self._first = tuple(arrays), seq_len, facts, first
        self._ends = list(accumulate(max(0, len(array) - 1) // seq_len for array in self._arrays))
        self._num_samples = self._ends[-1] - first if num_samples is None else num_samples

    @property
    def modified(self) -> dict[str, int]:
        """Return when each file was last changed, where the record's digest is of blocks alone."""
        mapped = [array for array in self._arrays if isinstance(array, MappedTokens)]
        return {str(array.path): array.modified_ns for array in mapped} if "sha256_sampled" in self._facts else {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        number = self._first + index
        place = bisect_right(self._ends, number)
        start = (number - (self._ends[place - 1] if place else 0)) * self._seq_len
        tokens = torch.from_numpy(np.array(self._arrays[place][start : start + self._seq_len + 1], dtype=np.int64))
        if self._documents is not None:
            return divided_at_ends(tokens[:-1], tokens[1:], self._documents)
        return tokens[:-1], tokens[1:]

    def record(self) -> dict[str, Any]:
        """Return the facts about the tokens and the counts."""
        return {
            **self._facts,
            "num_tokens": sum(len(array) for array in self._arrays),
            "seq_len": self._seq_len,
            "num_samples": len(self),
            "num_evaluation_samples": len(self.evaluation) if self.evaluation is not None else 0,
            "vocab_size": self.vocab_size,
        }


def held_out(
    arrays: Sequence[NDArray[Any] | MappedTokens],
    table: DataTable,
    *,
    vocab_size: int | None,
    facts: Mapping[str, Any],
) -> TokenSource:
    """Split tokens into sequences, and hold out the last ones for evaluation.

    Raises:
        DataError: There are fewer tokens than one sequence needs.
    """
    seq_len = table.seq_len
    total = sum(max(0, len(array) - 1) // seq_len for array in arrays)
    if total == 0:
        most = max(len(array) for array in arrays)
        count = f"{most} token{'s' * (most != 1)}" + (" in the largest file" if len(arrays) > 1 else "")
        mend = f"give more data, or set seq_len to at most {most - 1}" if most > 1 else "give more data"
        raise DataError(
            f'[data] use = "{table.use}" is shorter than one sequence: it has {count}, and seq_len = {seq_len} needs '
            f"{seq_len + 1} (the last target is one token further); {mend}"
        )
    num_evaluation = num_held_out(total, table.evaluation_fraction)
    evaluation = None
    if num_evaluation:
        evaluation = TokenSource(
            arrays,
            seq_len=seq_len,
            vocab_size=vocab_size,
            facts=facts,
            first=total - num_evaluation,
            documents=table.documents,
        )
    return TokenSource(
        arrays,
        seq_len=seq_len,
        vocab_size=vocab_size,
        facts=facts,
        num_samples=total - num_evaluation,
        evaluation=evaluation,
        documents=table.documents,
    )


def open_token_files(files: Sequence[Path], table: DataTable) -> TokenSource:
    """Open files of tokens as one source, in the given order.

    Raises:
        DataError: A file is empty, no array of tokens, or the files are shorter than one sequence.

    Memory: the pages that samples touch, which the system takes back when it needs them.
    """
    arrays = [map_token_file(file, table) for file in files]
    facts = {"kind": "tokens", "use": table.use, **file_facts(files), "tokenizer": None}
    return held_out(arrays, table, vocab_size=table.vocab_size, facts=facts)


def map_token_file(path: Path, table: DataTable) -> MappedTokens:
    """Map one file: `.npy` says its own dtype, `.bin` is raw tokens of `[data] dtype` in this machine's byte order.

    A `.bin` beside which an `.idx` lies is Megatron-LM's: the index says its dtype.

    Raises:
        DataError: The file is empty, truncated, or holds something else than one row of unsigned or int32/int64 tokens.
    """
    if path.stat().st_size == 0:
        raise DataError(f'[data] use = "{table.use}": {path.name} is empty; give a file of tokens')
    if path.suffix == ".npy":
        return _map_npy(path, table)
    index = index_of(path)
    if index is not None:
        return _map_indexed(path, index, table)
    dtype = np.dtype(table.dtype or "uint16")
    size, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise DataError(
            f'[data] use = "{table.use}": {path.name} has {path.stat().st_size} bytes, which is no whole number of '
            f"{dtype} tokens; set dtype, or write the file again"
        )
    tokens = MappedTokens(path, dtype=dtype, size=size)
    _refuse_other_dtype(tokens, table)
    return tokens


def _map_indexed(path: Path, index: Path, table: DataTable) -> MappedTokens:
    found = read_index(index, use=table.use)
    if table.dtype is not None and found.dtype != np.dtype(table.dtype):
        raise DataError(
            f'[data] dtype = "{table.dtype}", and {index.name} says {found.dtype}; remove dtype: the index says it'
        )
    return MappedTokens(path, dtype=found.dtype, size=found.num_tokens)


def _refuse_other_dtype(tokens: MappedTokens, table: DataTable) -> None:
    """Refuse raw tokens that are plainly not of the stated dtype: read as another one, they are ids all the same.

    Half of 32-bit tokens read as 16-bit ones are zeros, at every other place; 16-bit tokens read in pairs as 32-bit
    ones are larger than any vocabulary.

    Raises:
        DataError: Names the dtype that fits.
    """
    step = max(_STRETCH, tokens.size // _NUM_STRETCHES // 4 * 4)
    seen = np.concatenate([tokens[start : start + _STRETCH] for start in range(0, tokens.size, step)])
    stated = f'dtype = "{tokens.dtype}"' + ("" if table.dtype else ", the default")
    what = f'[data] use = "{table.use}": {tokens.path.name} does not hold tokens of {stated}'
    halves = [int(np.count_nonzero(seen[place::2])) for place in (0, 1)]
    if len(seen) >= 16 and min(halves) == 0 and max(halves) > len(seen) // 8:
        wider = "; it looks like 64-bit integers" if _is_sparse(seen[halves.index(max(halves)) :: 2]) else ""
        advice = 'set dtype = "uint32"' if tokens.dtype.itemsize == 2 and not wider else "write them as uint32 again"
        raise DataError(f"{what}: every other one is 0{wider}; {advice}")
    if tokens.dtype.itemsize == 4 and np.count_nonzero(seen >= _LARGEST_VOCABULARY) > len(seen) // 2:
        raise DataError(f'{what}: half of them are above {_LARGEST_VOCABULARY:,}; set dtype = "uint16"')


def _is_sparse(values: NDArray[Any]) -> bool:
    """Return whether every other one of the halves that are not zero is zero again."""
    return min(np.count_nonzero(values[0::2]), np.count_nonzero(values[1::2])) == 0


def _map_npy(path: Path, table: DataTable) -> MappedTokens:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f'[data] use = "{table.use}": {path.name} is not a .npy file of tokens; write it with numpy.save(path, '
            "tokens)"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise DataError(
            f'[data] use = "{table.use}": {path.name} holds {array.dtype} of shape {tuple(array.shape)}; '
            "tokens are one row of integers"
        )
    if table.dtype is not None and array.dtype != np.dtype(table.dtype):
        raise DataError(
            f'[data] dtype = "{table.dtype}", and {path.name} says {array.dtype}; remove dtype: a .npy file carries it'
        )
    return MappedTokens(path, dtype=array.dtype, size=array.shape[0], offset=array.offset)
