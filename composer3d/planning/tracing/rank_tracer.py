"""Tracer of ranks in a fake process group, each through one optimizer step."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from composer3d import ModelFindings, torch_compat
from composer3d.composition import routed_lists
from composer3d.errors import ComposerError
from composer3d.interfaces import Decisions
from composer3d.mesh import Role
from composer3d.planning.hardware.cluster import StackName
from composer3d.planning.schedules.planned_stages import WarmUp
from composer3d.planning.tracing.compiled_blocks import keep_as_compiled
from composer3d.planning.tracing.enough_microbatches import ShortStep
from composer3d.planning.tracing.equal_blocks import BlockTruncation
from composer3d.planning.tracing.equal_stages import Twin, twins_of
from composer3d.planning.tracing.extending import Depths, Sketch, extend, hold_more, repeat, run_alike, sketch_of
from composer3d.planning.tracing.fake_composition import (
    Job,
    composed,
    is_compiled,
    is_fused,
    make_lasting,
    prepared,
    prime_optimizer,
    run_step,
)
from composer3d.planning.tracing.rank_roles import Contents, contents_of, first_ranks
from composer3d.planning.tracing.second_process import Beside, halve
from composer3d.planning.tracing.sent_shapes import SentShapes
from composer3d.planning.tracing.stated_backends import stated_backends
from composer3d.planning.tracing.step_recorder import record_step
from composer3d.planning.tracing.summary import segments_of, summarise
from composer3d.planning.tracing.traced import RankTrace, Segment
from composer3d.processes import collect_new_objects, scanning_new_objects_only

__all__ = ["Tracer"]

# Blocks of the shorter one of two short stages; the other one has one more. Three have a first, a last, and the one
# before it, which FSDP2 gathers while the last one runs: where blocks are recomputed, that is where the peak may be.
_SHORT = 3
_LONG = _SHORT + 1  # of the longer one; a stage of so many is traced whole
logger = logging.getLogger(__name__)
Made = TypeVar("Made")
# A trace of a rank with that many blocks of each stage.
_Short = tuple[int, int]
# Takes a position in the pipeline, and whether the schedule can hold fewer micro-batches than it says.
ShortStepOf = Callable[[int, bool], ShortStep]
_EVENLY = "routing is assumed to be balanced: of what topk, argmax and the like choose from, each is chosen as often"
_UNCOMPILED = (
    "modules that are compiled were traced as they are written, and keep what products and attention make: a compiler "
    "may keep other tensors of the same size"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Traced:
    """Trace of a rank's step, with all blocks or fewer; `names` are those of every stage's blocks.

    `sketch` is None where the trace would add nothing: a longer one, or one of stages that are to be traced whole;
    `step` is what was traced of the step; `notes` are decisions of plugins.
    """

    sketch: Sketch | None
    names: list[list[str]]
    are_alike: bool
    step: ShortStep
    notes: tuple[str, ...] = ()


class Tracer:
    """Traces ranks one after the other, and caches the shapes that stages send each other.

    Args:
        job: Manifest, model and batch.
        extrapolate: False traces every block and every micro-batch.
        enough: Number of micro-batches after which every further one repeats, or the step to trace, by the rank's
            position in the pipeline and whether its schedule can hold fewer; default: all of them.
    """

    def __init__(self, job: Job, *, extrapolate: bool = True, enough: int | ShortStepOf | None = None) -> None:
        self._job, self._extrapolate = job, extrapolate
        self._enough = enough
        self._preparation = prepared(job)
        self._backends = stated_backends(self._preparation)
        self._cuts = extrapolate and not self._preparation.context.claimants("depth")
        self._positions = first_ranks(self._preparation.context.layout)
        self._sent = SentShapes(self._preparation, len(self._positions))
        # Results depend on shapes alone: other layouts of the model ask for many of them too.
        findings = self._preparation.context.stash(ModelFindings)
        self._memory = findings.once(torch_compat.ResultMemory, torch_compat.ResultMemory)
        self._routed = routed_lists(self._preparation.model)
        self._assumptions: dict[str, None] = {}

    def contents(self) -> list[Contents]:
        """Return the parameters of every position's stages; see `contents_of`."""
        return contents_of(self._preparation)

    def trace_all(self, chosen: Mapping[int, int]) -> list[RankTrace]:
        """Trace several ranks, as stages of three blocks and of four, half of the work in a forked process.

        Args:
            chosen: Number of ranks of the world that each rank represents; earlier stages first.
        """
        # Objects from before are not scanned; those that runs make are collected before each of them.
        with scanning_new_objects_only(collects=False):
            return self._cut_or_whole(lambda: self._trace_all(chosen))

    def _cut_or_whole(self, trace: Callable[[], Made]) -> Made:
        """Trace stages of few blocks; where that fails, as of blocks that stand side by side, all blocks."""
        if self._cuts:
            try:
                return trace()
            except ComposerError:
                raise
            except Exception as error:  # of a model's code, which may need all of its blocks
                logger.info("all blocks are traced: %s", error)
                self._cuts = False
        return trace()

    def _trace_all(self, chosen: Mapping[int, int]) -> list[RankTrace]:
        if not self._cuts:
            return [self.trace(rank, stands_for=number) for rank, number in chosen.items()]
        middle = [rank for rank in chosen if rank in self._positions[1:-1]]
        twins = twins_of(self._preparation, middle, self._step, whole=_LONG)
        own, lengths = [rank for rank in chosen if rank not in twins], (_SHORT, _LONG)
        # Head and loss of the last position take about as long as a block.
        blocks = {rank: int(len(self._positions) > 1 and rank == self._positions[-1]) for rank in own}
        costs = {key: (blocks[key[0]] + key[1]) * self._step(key[0]).num_microbatches for key in product(own, lengths)}
        # Both begin with the first rank, whose stage determines the shapes that the others receive.
        here, there = halve(costs, begin=((min(chosen), _SHORT), (min(chosen), _LONG)))
        with Beside(lambda: self._run_all(there)) as beside:
            traced = self._run_all(here)
            traced |= beside.result() or self._run_all(there)
        pairs = {rank: (traced[rank, _SHORT], traced[rank, _LONG]) for rank in own}
        pairs |= {rank: self._of_twin(twin, *pairs[twin.like]) for rank, twin in twins.items()}
        return [self._joined(rank, *pairs[rank], stands_for=number) for rank, number in chosen.items()]

    def _of_twin(self, twin: Twin, short: _Traced, longer: _Traced) -> tuple[_Traced, _Traced]:
        """Return a rank's traces by those of the one that it is like; its own, where these are not to be extended."""
        one, other = twin.of(short.sketch), twin.of(longer.sketch)
        if one is None or (other is None and len(twin.names) > _LONG) or not short.are_alike:
            return self._run(twin.rank, _SHORT, whole=_LONG), self._longer(twin.rank)
        mine = replace(short, sketch=one, names=[list(twin.names)], step=self._step(twin.rank))
        return mine, replace(mine, sketch=other, notes=longer.notes)

    def _run_all(self, traces: Sequence[_Short]) -> dict[_Short, _Traced]:
        return {key: self._run(*key, whole=_LONG, if_longer=key[1] > _SHORT) for key in traces}

    def depths(self, rank: int = 0) -> Depths:
        """Trace a rank of one stage at two depths, one of them in a forked process, and extrapolate nothing.

        Args:
            rank: Global.
        """
        with scanning_new_objects_only(collects=False):
            return self._cut_or_whole(lambda: self._depths(rank))

    def _depths(self, rank: int) -> Depths:
        with Beside(lambda: self._longer(rank) if self._cuts else None) as beside:
            short = self._run(rank, _SHORT if self._cuts else None)
            number = sum(map(len, short.names))
            are_short = self._cuts and short.are_alike and number > _SHORT
            longer = (beside.result() or self._longer(rank)).sketch if are_short else None
        if longer is not None and short.sketch is not None and not run_alike(short.sketch, longer):
            short, longer = self._run(rank, None), None
        assert short.sketch is not None, "a stage of that many blocks"
        num_short = number if longer is None else _SHORT
        return Depths(short=short.sketch, longer=longer, num_short=num_short, num_blocks=number)

    def segments(self, sketch: Sketch) -> tuple[Segment, ...]:
        """Return what a step of a sketch from `depths` runs, in order of first appearance."""
        return segments_of(sketch, self._preparation.context, self._backends)

    def trace(self, rank: int, *, stands_for: int = 1) -> RankTrace:
        """Trace one rank.

        Equal blocks are traced as stages of three and of four, and the rest is extrapolated: every further block adds
        the same to each count and to each moment's bytes. So do micro-batches, once their number in flight has reached
        its peak.

        Args:
            rank: Global.
            stands_for: Number of ranks of the world that it represents.
        """

        def traced() -> RankTrace:
            short = self._run(rank, _SHORT if self._cuts else None, whole=_LONG)
            return self._joined(rank, short, None, stands_for=stands_for)

        return self._cut_or_whole(traced)

    def _longer(self, rank: int) -> _Traced:
        return self._run(rank, _LONG, if_longer=True)

    def _joined(self, rank: int, short: _Traced, longer: _Traced | None, *, stands_for: int) -> RankTrace:
        """Return the trace of a rank from its short one and, if there is one, a longer one."""
        counts = {len(names) for names in short.names}
        if not self._cuts or not short.are_alike or max(counts, default=0) <= _LONG:
            return self._summary(rank, short, short.sketch, stands_for=stands_for, is_extrapolated=False)
        if len(counts) == 1:
            longer = longer or self._longer(rank)
            assert short.sketch is not None and longer.sketch is not None, "stages of that many blocks"
            sketch = extend(short.sketch, longer.sketch, by=max(counts) - _LONG)
            if sketch is not None:
                return self._summary(rank, longer, sketch, stands_for=stands_for, is_extrapolated=True)
        whole = self._run(rank, None)
        return self._summary(rank, whole, whole.sketch, stands_for=stands_for, is_extrapolated=False)

    def _summary(
        self, rank: int, traced: _Traced, sketch: Sketch | None, *, stands_for: int, is_extrapolated: bool
    ) -> RankTrace:
        assert sketch is not None, "what is summed up was traced"
        number, in_flight = traced.step.num_microbatches, traced.step.most_in_flight
        more = self._job.num_microbatches - number
        if in_flight is not None:
            sketch = hold_more(sketch, in_flight=in_flight, by=traced.step.fewer_in_flight)
        if more:
            sketch = repeat(sketch, num_microbatches=number, more=more, repeated=traced.step.repeated)
        context = copy.copy(self._preparation.context)
        context.coordinates = context.layout.coordinates(rank)
        return summarise(
            sketch,
            context=context,
            blocks=traced.names,
            rank=rank,
            stands_for=stands_for,
            is_extrapolated=is_extrapolated or more > 0,
            notes=[*traced.notes, *([_UNCOMPILED] if self._fuses else []), *self._assumptions],
            backends=self._backends,
        )

    @property
    def job(self) -> Job:
        """Job that is traced, with its preparation."""
        return replace(self._job, preparation=self._preparation)

    @property
    def stack(self) -> StackName:
        """The software that runs the steps, as hardware files name it."""
        return "compiled" if self._fuses else "eager"

    @property
    def device(self) -> str:
        """Kind of device of the run."""
        return self._preparation.context.run_device.type

    @property
    def _compiles(self) -> bool:
        return is_compiled(self._preparation)

    @property
    def _fuses(self) -> bool:
        return is_fused(self._preparation)

    def _uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Run compiled modules eagerly: a compiler's kernels do not run on fake tensors."""
        import torch

        return torch.compiler.set_stance("force_eager") if self._compiles else contextlib.nullcontext()

    def _step(self, rank: int) -> ShortStep:
        """Return what of a rank's step is traced."""
        number = self._job.num_microbatches
        if not self._extrapolate or self._enough is None:
            return ShortStep(num_microbatches=number)
        if isinstance(self._enough, int):
            return ShortStep(num_microbatches=min(self._enough, number))
        return self._enough(self._position(rank), self._warm_up.can_be_shorter)

    @property
    def _warm_up(self) -> WarmUp:
        return self._preparation.context.stash(WarmUp)

    @contextlib.contextmanager
    def _holding(self, most_in_flight: int | None) -> Iterator[None]:
        """Let the schedule hold so many micro-batches at most; None: as many as it says."""
        self._warm_up.most_in_flight = most_in_flight
        try:
            yield
        finally:
            self._warm_up.most_in_flight = None

    def _position(self, rank: int) -> int:
        """Return a rank's position in the pipeline."""
        layout = self._preparation.context.layout
        own = layout.coordinates(rank)
        stages = layout.names(Role.STAGE)
        return next(
            place
            for place, first in enumerate(self._positions)
            if all(layout.coordinates(first)[name] == own[name] for name in stages)
        )

    def _run(self, rank: int, keep: int | None, *, whole: int = 0, if_longer: bool = False) -> _Traced:
        """Trace a rank with at most `keep` blocks per stage, or all of a stage that has at most `whole`.

        Args:
            rank: Global.
            keep: Blocks; None for all.
            whole: Blocks.
            if_longer: Make no sketch where a shorter trace has all blocks.
        """
        self._hear(rank)
        job, sent, truncation, step = self._job, self._sent, BlockTruncation(keep, whole=whole), self._step(rank)
        collect_new_objects()  # what lies in reference cycles is freed at the same moments in every run
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with (
                self._uncompiled(),
                self._assuming(),
                self._holding(step.most_in_flight),
                self._memory.shardings(),
                composed(job, self._preparation, rank, truncation=truncation, memory=self._memory) as run,
            ):
                if truncation.is_idle(short=_SHORT, if_longer=if_longer):
                    return _Traced(sketch=None, names=truncation.names, are_alike=truncation.are_alike, step=step)
                if self._fuses:
                    keep_as_compiled(run, self._preparation)
                optimizer = job.make_optimizer(run)
                prime_optimizer(run, optimizer)
                averages = job.averages(run)
                args, inputs, target = job.batch(step.num_microbatches)
                step_once = partial(run_step, run, optimizer, args, target, averages=averages)
                with (
                    record_step(
                        run, optimizer, (args, target, dict(inputs)), memory=self._memory, averages=averages
                    ) as observer,
                    torch_compat.lone_pipeline(observer.preparing, sent.note, sent.wanted, observer.await_message),
                    torch_compat.lone_buckets() as buckets,
                ):
                    make_lasting(run, *job.batch(job.num_microbatches))
                    # Buckets are made in the first step, and plugins may measure in it.
                    differs = bool(run.context.claimants("first_step"))
                    for attempt in (1, 2):
                        observer.restart()
                        step_once(inputs=inputs, grad_clip=job.grad_clip, number=attempt)
                        freed = observer.free_unused_state()
                        if not (buckets or differs or freed):
                            break
                sketch = sketch_of(observer.result, truncation.places_of)
                notes = tuple(dict.fromkeys(run.context.stash(Decisions).notes))
                return _Traced(
                    sketch=sketch,
                    names=truncation.names,
                    are_alike=truncation.are_alike,
                    step=step,
                    notes=notes,
                )
        finally:
            if was_enabled:
                gc.enable()

    @contextlib.contextmanager
    def _assuming(self) -> Iterator[None]:
        """Assume sizes that values decide: of rows chosen for the entries of a list, each entry's equal share."""
        share = max((1 / number for number in self._routed.values()), default=1.0)
        chosen = self._memory.chosen
        chosen.have_decided = False
        with torch_compat.assumed_share(share), torch_compat.were_sizes_assumed() as were_assumed:
            yield
        first = next(iter(self._routed), None)
        if first is not None and (were_assumed() or chosen.have_decided):
            self._assumptions[
                f'routing is assumed to be balanced: each of the {self._routed[first]} entries of "{first}" '
                "and lists like it is given the same number of rows"
            ] = None
            return
        if chosen.have_decided:
            self._assumptions[_EVENLY] = None
        if were_assumed():
            self._assumptions["sizes that the values of a batch decide were taken at their largest"] = None

    # ---- what stages say to each other -------------------------------------------------------------------------------

    def _hear(self, rank: int) -> None:
        """Trace the stages that send what a rank's stages receive, where none that is like them was traced."""
        for stage in self._sent.unknown(self._position(rank)):
            with self._sent.listening(stage):
                self._run(self._positions[self._sent.owner(stage)], 1 if self._cuts else None)
