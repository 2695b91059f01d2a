"""Sample order: the sample at each position of the stream, a pure function of seed and position in any layout.

The stream is endless: epoch after epoch, each a permutation of the data set. Step s takes the positions after those of
the steps before it, and every data-parallel rank its contiguous slice, so that neither the number of ranks nor a
restart changes what a step trains on. No permutation is ever stored.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from composer3d.errors import BatchError, DataError
from composer3d.mesh.batch_pieces import pieces_of

if TYPE_CHECKING:
    from composer3d.context import RunContext

__all__ = ["Sampler", "indices", "local_slice", "sampler_of"]

_ROUNDS = 8
# Up to here an epoch is sorted by hash: the network's rounds reach too few permutations of very small sets.
_SORTED_SIZE = 1024

_Indices = TypeVar("_Indices", Sequence[int], NDArray[np.int64])


def indices(position: int, count: int, *, size: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the samples at `position` to `position + count - 1` of an endless stream of epochs.

    Epoch e is a permutation of `range(size)` keyed by blake2b of (seed, e): a Feistel network over a grid of a x b
    cells with a * b >= size that walks on from cells outside the range ("cycle walking"). It is evaluated only at the
    requested positions: memory and time are O(count), whatever the size (0.1 ms for 1024 of 1e9 samples). Sets of at
    most 1024 samples are sorted by hash instead.
    Source: John Black and Phillip Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.

    Args:
        position: First position in the stream, counted from 0 over all epochs.
        count: How many samples.
        size: Samples in the data set.
        seed: Another seed gives another order.
        shuffle: False gives every epoch in the order of the data set.

    Raises:
        DataError: A size below 1, or a negative position or count.

    >>> sorted(indices(0, 5, size=5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    position, count, size = operator.index(position), operator.index(count), operator.index(size)
    if size < 1:
        raise DataError(f"a data set of {size} samples has no order; it needs at least 1 sample")
    if position < 0 or count < 0:
        raise DataError(f"the stream of samples has no position {position} with {count} samples; both start at 0")
    epochs, offsets = np.divmod(np.arange(position, position + count, dtype=np.int64), size)
    if not shuffle or size == 1 or count == 0:
        return offsets
    first, last = int(epochs[0]), int(epochs[-1])
    keys = np.stack([_round_keys(seed, epoch) for epoch in range(first, last + 1)])
    if size <= _SORTED_SIZE:
        hashes = _mix(_mix(np.arange(size, dtype=np.uint64) + keys[:, :1]) ^ keys[:, 1:2])
        return np.argsort(hashes, axis=1, kind="stable")[epochs - first, offsets]
    return _walk(offsets.astype(np.uint64), keys[epochs - first].T, size).astype(np.int64)


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"composer3d data order {int(seed)} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _walk(values: NDArray[np.uint64], keys: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Permute `range(size)`: encrypt, and encrypt again whatever fell outside. The walk ends: it is part of a cycle."""
    height = int(np.sqrt(size - 1)) + 1
    width = -(-size // height)
    assert height * width >= size
    values = _encrypt(values, keys, height, width)
    while (outside := np.flatnonzero(values >= size)).size:
        values[outside] = _encrypt(values[outside], keys[:, outside], height, width)
    return values


def _encrypt(values: NDArray[np.uint64], keys: NDArray[np.uint64], height: int, width: int) -> NDArray[np.uint64]:
    """One pass of the network over `range(height * width)`; each round moves one half by a hash of the other."""
    rows, columns = np.divmod(values, np.uint64(width))
    for number in range(0, _ROUNDS, 2):
        rows = (rows + _mix(columns + keys[number]) % np.uint64(height)) % np.uint64(height)
        columns = (columns + _mix(rows + keys[number + 1]) % np.uint64(width)) % np.uint64(width)
    return rows * np.uint64(width) + columns


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); uint64 arrays wrap without a warning."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def local_slice(indices: _Indices, rank: int, degree: int, *, num: int = 1) -> _Indices:
    """Return one data-parallel rank's contiguous slice of a global batch.

    Args:
        indices: The global batch; anything that can be sliced.
        rank: Data-parallel rank, 0 to degree - 1; where ranks read different numbers of samples, its first piece.
        degree: Data-parallel degree, or the pieces of all ranks.
        num: Pieces of this rank.

    Raises:
        BatchError: The batch does not divide by the degree.
    """
    size = len(indices)
    if degree < 1 or not 0 <= rank < degree:
        raise BatchError(f"data-parallel rank {rank} does not exist among {degree}; ranks are 0 to degree - 1")
    if size % degree:
        fits = [str(n) for n in (size - size % degree, size - size % degree + degree) if n]
        raise BatchError(
            f"a global batch of {size} samples does not divide over {degree} data-parallel ranks; "
            f"use {' or '.join(fits)}"
        )
    local = size // degree
    return indices[rank * local : (rank + num) * local]


class Sampler:
    """A batch sampler for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`: this rank's indices of each step.

    One pass over it yields `len(sampler)` steps and the next pass continues where it ended. Step s takes the positions
    s * global_batch and on of the stream of `indices`, so a step is the same whatever the layout and the workers.

    A loader that prefetches runs ahead of the training: call `set_step(n + 1)` after step n, and `state_dict` is exact
    with any number of workers. Without that call the sampler counts the steps that it has yielded.

    Args:
        dataset_or_size: A data set with a length, or the length.
        seed: Seed of the order.
        global_batch: Samples per step over all data-parallel ranks.
        rank: Data-parallel rank; where ranks read different numbers of samples, its first piece of the batch.
        degree: Data-parallel degree, or the pieces of all ranks.
        num: Pieces of this rank.
        shuffle: False keeps the order of the data set.

    Raises:
        BatchError: The batch does not divide by the degree, or is larger than the data set.
        DataError: The data set has no length, or is empty.
    """

    def __init__(
        self,
        dataset_or_size: Sized | int,
        *,
        seed: int,
        global_batch: int,
        rank: int,
        degree: int,
        num: int = 1,
        shuffle: bool = True,
    ) -> None:
        self._size = _size_of(dataset_or_size)
        self._seed, self._shuffle = seed, shuffle
        self._global_batch, self._rank, self._degree, self._num = global_batch, rank, degree, num
        if global_batch < 1:
            raise BatchError(f"a global batch of {global_batch} samples is empty; use at least {degree}")
        local_slice(range(global_batch), rank, degree, num=num)
        if global_batch > self._size:
            raise BatchError(f"a global batch of {global_batch} samples is larger than the data set of {self._size}")
        self._step = 0
        self._kept_by_caller = False

    def __len__(self) -> int:
        """Return the steps of one pass: the whole batches in an epoch."""
        return self._size // self._global_batch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices from the current step to the end of the pass."""
        step = self._step
        self._kept_by_caller = False
        for number in range(step, (step // len(self) + 1) * len(self)):
            local = self.local_indices(number)
            if not self._kept_by_caller:
                self._step = number + 1
            yield local

    def local_indices(self, step: int) -> list[int]:
        """Return this rank's indices of a step."""
        start = step * self._global_batch
        batch = indices(start, self._global_batch, size=self._size, seed=self._seed, shuffle=self._shuffle)
        return local_slice(batch, self._rank, self._degree, num=self._num).tolist()

    def set_step(self, step: int) -> None:
        """Make the next pass start at a step; a pass that is under way continues unchanged."""
        if step < 0:
            raise DataError(f"there is no step {step}; steps start at 0")
        self._step = step
        self._kept_by_caller = True

    def state_dict(self) -> dict[str, Any]:
        """Return the step that comes next, with what the order depends on."""
        return {"step": self._step, "seed": self._seed, "size": self._size, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved step.

        Raises:
            DataError: The state belongs to another order: another seed, size or shuffle.
        """
        for key, mine in self.state_dict().items():
            if key != "step" and state[key] != mine:
                raise DataError(
                    f"the saved data order has {key} = {state[key]!r} and this one {mine!r}; "
                    "going on would repeat some samples and leave out others"
                )
        self.set_step(state["step"])


def _size_of(dataset_or_size: Sized | int) -> int:
    if isinstance(dataset_or_size, int):
        size = dataset_or_size
    elif isinstance(dataset_or_size, Sized):
        size = len(dataset_or_size)
    else:
        raise DataError(
            f"a {type(dataset_or_size).__name__} has no length, so its samples have no order; give a map-style data "
            "set with __len__ and __getitem__, or the number of samples"
        )
    if size < 1:
        raise DataError(f"a data set of {size} samples has no order; it needs at least 1 sample")
    return size


def sampler_of(dataset: Any, context: RunContext) -> Sampler:
    """Return the sampler of a run; see `Composition.sampler`."""
    train, pieces = context.manifest.train, pieces_of(context)
    return Sampler(
        dataset,
        seed=train.seed,
        global_batch=train.batch_over(pieces.total * context.layout.num_groups),
        **pieces.slice,
    )
