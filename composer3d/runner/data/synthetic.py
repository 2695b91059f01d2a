"""Synthetic tokens: sample i is a function of the seed and i."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from composer3d.runner.data.data_source import Sample, Source
from composer3d.runner.data.data_table import DataTable

__all__ = ["SyntheticSource", "open_synthetic"]

_NUM_SAMPLES = 1 << 30
_NUM_EVALUATION = 1 << 10


class SyntheticSource(Source):
    """Uniform tokens from numpy's Philox counter, whose raw stream is the same in every version of numpy.

    Args:
        seed: Of the run.
        seq_len: Tokens per sequence.
        vocab_size: Tokens are below it.
        first: The first sample of this source.
        num_samples: How many samples; nothing is stored.
        evaluation: The samples held out.
    """

    def __init__(
        self,
        *,
        seed: int,
        seq_len: int,
        vocab_size: int,
        first: int = 0,
        num_samples: int = _NUM_SAMPLES,
        evaluation: Source | None = None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, evaluation=evaluation)
        self._seed, self._seq_len, self._first, self._num_samples = seed, seq_len, first, num_samples
        self._vocab = vocab_size
        self._key = int.from_bytes(hashlib.blake2b(f"synthetic {seed}".encode(), digest_size=8).digest(), "little")

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        key = np.array([self._key, self._first + index], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(self._seq_len + 1)
        tokens = torch.from_numpy((words % np.uint64(self._vocab)).astype(np.int64))
        return tokens[:-1], tokens[1:]

    def record(self) -> dict[str, Any]:
        """Return the kind, the seed and the counts; there is no text to hash."""
        return {
            "kind": "synthetic",
            "use": "synthetic",
            "seed": self._seed,
            "seq_len": self._seq_len,
            "num_samples": len(self),
            "num_evaluation_samples": len(self.evaluation) if self.evaluation is not None else 0,
            "tokenizer": None,
            "vocab_size": self.vocab_size,
        }


def open_synthetic(table: DataTable, *, seed: int) -> SyntheticSource:
    """Return endless random tokens, with samples of their own for evaluation unless `evaluation_fraction` is 0."""
    vocab_size = table.vocab_size or 256
    evaluation = None
    if table.evaluation_fraction:
        evaluation = SyntheticSource(
            seed=seed, seq_len=table.seq_len, vocab_size=vocab_size, first=_NUM_SAMPLES, num_samples=_NUM_EVALUATION
        )
    return SyntheticSource(seed=seed, seq_len=table.seq_len, vocab_size=vocab_size, evaluation=evaluation)
