"""Sharded view of a loop's DataLoader: every rank reads its slice of each global batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from composer3d.errors import BatchError, StepError
from composer3d.initialisation import seed_of
from composer3d.mesh.batch_pieces import pieces_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from composer3d.context import RunContext
    from composer3d.step.loops.accumulated_steps import AccumulatedSteps
    from composer3d.step.loops.loop_state import LoopState
    from composer3d.step.losses.detached_statistics import DetachedStatistics

__all__ = ["shared_loader"]

_END = object()


class _Part:
    """Batch sampler of this rank's slice of another sampler's batches, whose order all ranks share."""

    def __init__(self, loader: DataLoader[Any], context: RunContext) -> None:
        self._batches: Any = loader.batch_sampler
        self._generator, self._context, self._epoch, self._is_told = loader.generator, context, 0, False

    def __iter__(self) -> Iterator[list[int]]:
        pieces = pieces_of(self._context)
        batches, sizes = self._drawn()
        self._epoch += 1
        self._tell(sizes, pieces.total)
        for batch in batches:
            if (reason := _refusal(len(batch), pieces.total)) is not None:
                raise BatchError(reason)
            size, more = divmod(len(batch), pieces.total)
            ends = (at * size + min(at, more) for at in (pieces.first, pieces.first + pieces.num))
            yield batch[slice(*ends)]

    def _drawn(self) -> tuple[Iterable[list[int]], Sequence[int]]:
        """Return the batches of an epoch, and how many samples each has."""
        import torch

        batches, generator = self._batches, self._generator
        # A sampler without a generator draws from torch's default one, which differs between ranks.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self._context.manifest.train.seed, "loader", self._epoch))
            if generator is not None:  # the loader of one device draws its workers' seed of it first
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            if not _draws_of_its_own(batches):
                drawn = [list(batch) for batch in batches]
                return drawn, [len(batch) for batch in drawn]
        # Batch by batch, as on one device: at the end of an epoch it draws once more, which one that a loop leaves does
        # not reach.
        whole, rest = divmod(len(batches.sampler), batches.batch_size)
        return batches, [batches.batch_size] * whole + [rest] * (rest > 0 and not batches.drop_last)

    def _tell(self, sizes: Sequence[int], num_ranks: int) -> None:
        """Warn of a batch that will be refused, once."""
        found = ((number, _refusal(size, num_ranks)) for number, size in enumerate(sizes, 1))
        number, reason = next(((number, reason) for number, reason in found if reason is not None), (0, ""))
        if reason and not self._is_told:
            self._is_told = True
            message = f"batch {number} of the {len(sizes)} of an epoch will be refused: {reason}"
            warnings.warn(message, stacklevel=3)

    def __len__(self) -> int:
        return len(self._batches)


def _draws_of_its_own(batches: Any) -> bool:
    """Return whether torch's own samplers shuffle, by a generator that the loop has given them."""
    from torch.utils.data import BatchSampler, RandomSampler

    sampler = getattr(batches, "sampler", None)
    return type(batches) is BatchSampler and type(sampler) is RandomSampler and sampler.generator is not None


def _refusal(num_samples: int, num_ranks: int) -> str | None:
    """Return why ranks cannot share a batch; None where they can: not where one would have no sample of it."""
    if num_samples >= num_ranks:
        return None
    return (
        f"a batch of {num_samples} sample{'s' * (num_samples > 1)} is too small for {num_ranks} ranks that read "
        "samples of their own; give the DataLoader drop_last=True, or a batch_size that leaves more for its last batch"
    )


def _with_ends(batches: Iterator[Any], num: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether each is the last one: of an unknown number the following is read before it."""
    if num is None:
        yield from ((batch, following is _END) for batch, following in pairwise(chain(batches, (_END,))))
    else:
        yield from ((batch, number == num) for number, batch in enumerate(batches, 1))


def _saying_the_last(
    batches: Iterator[tuple[Any, bool]], accumulated: AccumulatedSteps, detached: DetachedStatistics, loop: LoopState
) -> Iterator[Any]:
    """Yield batches; a loop that evaluates on another loader meanwhile finds what it was told before."""
    before = accumulated.has_ended
    try:
        for batch, is_last in batches:
            accumulated.has_ended = is_last
            detached.over_batch(batch)
            loop.num_read += 1
            yield batch
            detached.end()
    finally:
        detached.end()
        accumulated.has_ended = before


def shared_loader(
    loader: DataLoader[Any],
    context: RunContext,
    *,
    accumulated: AccumulatedSteps,
    detached: DetachedStatistics,
    loop: LoopState,
) -> DataLoader[Any]:
    """Return a loader of this rank's samples that says which batch is its last; see `Composition.loader`.

    Args:
        loader: The loop's.
        context: Of the run.
        accumulated: Told which batch is the last.
        detached: Follows what the loop computes of each batch before a forward.
        loop: Counts the batches.
    """
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise StepError(
            "run.loader(...) takes a DataLoader with batches of a map-style dataset; let an IterableDataset yield "
            "sample i where i % run.context.num_readers == run.context.reader"
        )
    if isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), DistributedSampler):
        raise StepError(
            "run.loader(...) was given a DataLoader with a DistributedSampler, whose part of the samples it would "
            "divide again, and never read the rest; leave it out, and write shuffle=True and all ranks' batch_size"
        )
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options = {name: getattr(loader, name) for name in (*kept, "multiprocessing_context", "persistent_workers")}

    class Shared(DataLoader[Any]):
        def __iter__(self) -> Any:
            # A sampler that draws at its end, too, is not read to it before the loop is.
            num = len(self) if _draws_of_its_own(loader.batch_sampler) else None
            return _saying_the_last(_with_ends(super().__iter__(), num), accumulated, detached, loop)

    return Shared(loader.dataset, batch_sampler=_Part(loader, context), **options)
