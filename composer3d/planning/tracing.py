"""Ranks of a world that is not there, each traced through one optimizer step."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.planning.blocks import BlockCut
from composer3d.planning.composing import Job, composed, make_lasting, prepared, prime_optimizer, run_step
from composer3d.planning.extending import Sketch, extend, repeat, sketch_of
from composer3d.planning.recording import record_step
from composer3d.planning.summary import summarise
from composer3d.planning.traced import RankTrace

if TYPE_CHECKING:
    pass

__all__ = ["Tracer"]

# Blocks of the shorter one of two short stages; the other one has one more. Three have a first, a last, and the one
# before it, which FSDP2 gathers while the last one runs: where blocks are recomputed, that is where the peak may be.
_SHORT = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class _Traced:
    sketch: Sketch
    cut: BlockCut
    context: Any


class Tracer:
    """Traces ranks one after the other, and remembers what stages send each other.

    Args:
        job: What is planned.
        extrapolate: False traces every block and every micro-batch.
        enough: Micro-batches, after which every further one does the same; default: all of them.
    """

    def __init__(self, job: Job, *, extrapolate: bool = True, enough: int | None = None) -> None:
        self._job, self._extrapolate = job, extrapolate
        self._num_microbatches = (
            min(enough or job.num_microbatches, job.num_microbatches) if extrapolate else job.num_microbatches
        )
        self._preparation = prepared(job)
        self._sent: dict[int, Any] = {}

    def trace(self, rank: int, *, stands_for: int = 1) -> RankTrace:
        """Trace one rank.

        Blocks that are alike are traced as stages of three and of four, and the rest follows: by every further block
        each count and each moment's bytes grow by the same. So it is with micro-batches, once as many are in flight as
        there ever are.

        Args:
            rank: Global.
            stands_for: How many ranks of the world do the same.
        """
        short = self._run(rank, _SHORT if self._extrapolate else None)
        counts = {len(names) for names in short.cut.names}
        if not self._extrapolate or (short.cut.are_alike and counts and max(counts) <= _SHORT):
            return self._summary(rank, short, short.sketch, stands_for=stands_for, is_extrapolated=False)
        if short.cut.are_alike and len(counts) == 1:
            longer = self._run(rank, _SHORT + 1)
            long = max(counts) - _SHORT - 1
            sketch = longer.sketch if not long else extend(short.sketch, longer.sketch, by=long)
            if sketch is not None:
                return self._summary(rank, longer, sketch, stands_for=stands_for, is_extrapolated=long > 0)
        whole = short if not short.cut.are_alike else self._run(rank, None)
        return self._summary(rank, whole, whole.sketch, stands_for=stands_for, is_extrapolated=False)

    def _summary(
        self, rank: int, traced: _Traced, sketch: Sketch, *, stands_for: int, is_extrapolated: bool
    ) -> RankTrace:
        more = self._job.num_microbatches - self._num_microbatches
        if more:
            sketch = repeat(sketch, num_microbatches=self._num_microbatches, more=more)
        return summarise(
            sketch,
            context=traced.context,
            blocks=traced.cut.names,
            rank=rank,
            stands_for=stands_for,
            is_extrapolated=is_extrapolated or more > 0,
        )

    def _run(self, rank: int, keep: int | None) -> _Traced:
        job, cut = self._job, BlockCut(keep)
        # What lies in reference cycles is freed at the same moments in every run.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with composed(job, self._preparation, rank, cut=cut) as run:
                optimizer = job.make_optimizer(run)
                prime_optimizer(run, optimizer)
                args, target = job.batch(self._num_microbatches)
                inputs = job.inputs(target)
                with (
                    record_step(run, optimizer, (args, target, dict(inputs))) as observer,
                    torch_compat.lone_pipeline(observer.preparing, self._note, self._wanted),
                ):
                    make_lasting(run, args, target, inputs)
                    observer.restart()
                    run_step(run, optimizer, args, target, inputs=inputs, grad_clip=job.grad_clip)
                return _Traced(sketch=sketch_of(observer.result, cut.role_of), cut=cut, context=copy.copy(run.context))
        finally:
            if was_enabled:
                gc.enable()

    # ---- what stages say to each other -------------------------------------------------------------------------------

    def _note(self, stage: int, _: int, description: Any) -> None:
        self._sent[stage] = description

    def _wanted(self, stage: int, source: int) -> Any:
        """Return what a stage sends; if it was not traced, what the nearest one before it sends."""
        before = [index for index in self._sent if index <= source]
        if before:
            return self._sent[max(before)]
        return next(iter(self._sent.values()))
