"""Pipeline parallelism: stages of any model, torch's schedules over them.

The modules, in the order in which a composition uses them:

`split_choice` divides the model: straight (`division`, from a `block_trace`) where its blocks are called once each and
in order, else from a trace of its values (`tracer`, `traced_split`, at `split_places`), both on `tensor_origins`, which
follow every tensor of a forward on meta (`values` has those that control flow reads). `balance` sets the boundaries,
`schedule_rules` and `csv_schedule` say which rank has which stages. A `stage` or `traced_stage` is made of a copy of
the model (`surgery`); what other stages compute is `absent` in it. `runtime` runs the stages by torch's schedules, and
`shared_parameters` keeps tied parameters of several stages equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from composer3d import (
    Action,
    LayoutOffer,
    LayoutTraits,
    ModelFindings,
    Part,
    Phase,
    PluginError,
    ReceivedValues,
    RunContext,
    Schedule,
    Split,
    StageForms,
    StepAction,
    StepPoint,
    Transform,
    WarmUp,
    hookimpl,
    pieces_of,
    plugin,
    reducing_point,
    select_fqns,
    torch_compat,
)
from composer3d_plugins.scheduling.pipeline.balance import Load, balance, peak_in_flight
from composer3d_plugins.scheduling.pipeline.csv_schedule import CustomSchedule, read_schedule
from composer3d_plugins.scheduling.pipeline.schedule_rules import (
    RULES,
    NamedSchedule,
    ScheduleName,
    order_of_one_stage,
)

if TYPE_CHECKING:
    from torch import nn

    from composer3d_plugins.scheduling.pipeline.division import Division
    from composer3d_plugins.scheduling.pipeline.shared_parameters import Ties


# What `suggest` tries, each with numbers of stages a rank.
SUGGESTED = (("1F1B", (1,)), ("Interleaved1F1B", (2, 4)), ("ZBVZeroBubble", (2,)))
_CsvFile = Annotated[str, StringConstraints(pattern=r"\.csv$")]


# Beyond this many micro-batches the split does not change any more, and listing them all would take long.
_MANY_MICROBATCHES = 1024


@dataclass(kw_only=True, eq=False)
class _Memory:
    """State of a run: the model's division into stages, and its tied parameters."""

    division: Division[Any]
    ties: Ties | None = None


def _range(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Split the model into stages where `pp` has several ranks."""
    if degrees.get("pp", 1) == 1:
        return None
    stages = wanted.stages_per_rank or 1
    return {"schedule": wanted.schedule or "1F1B", **({"stages_per_rank": stages} if stages > 1 else {})}


@plugin(family="scheduling", owns=("pp",), offer=LayoutOffer(table=_table, choices={"schedule": SUGGESTED}))
class Pipeline:
    """Split the model into stages along pp and run micro-batches through them by one of torch's schedules.

    Every stage runs the model's own forward: the blocks of other stages return the hidden state x_BSD as it is and hold
    no weights, embeddings of other stages return zeros, the received x_BSD enters at the stage's first block, and the
    forward ends after its last block. Every pp rank is given the same batch, so masks and positions are computed where
    they are needed. Which stage needs which parameter is seen in one forward on meta (`example`, else token numbers). A
    parameter that several stages need has a replica on each, with all-reduced gradients.
    Blocks that are not called once each, in order, hidden state first, and models without one list of equal blocks, are
    traced: the values that modules return are propagated through the forward on meta, and those that later stages need
    are sent. Where no blocks are named, stages begin at blocks of any lists; where those are too few, or of unequal
    cost, at the blocks inside them that are called one after the other, or at other modules. torch's `pipeline()`
    divides so too, by exporting a graph; here stages keep the model's modules, names, output and any shapes, so that
    other plugins find them.

    Memory: the parameters of a rank's stages. Activations of as many micro-batches as are in flight:
        GPipe and LoopedBFS all of them, 1F1B at most pp - rank, the others between pp and 2 pp stages' worth.
    Collectives: per micro-batch and stage boundary between ranks one message forward and one backward, under `tracer`
        one for each value that is sent; per parameter with replicas on several ranks one all-reduce a step. The first
        step, and the first of another shape, runs one micro-batch more to learn shapes.

    Source: Huang et al., GPipe, arXiv:1811.06965; Narayanan et al., Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM, arXiv:2104.04473; Lamy-Poirier, Breadth-First Pipeline Parallelism,
    arXiv:2211.05953; Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241; DeepSeek-AI, DeepSeek-V3,
    arXiv:2412.19437.

    Args:
        schedule: Who runs which micro-batch when. GPipe and 1F1B have one stage a rank; Interleaved1F1B, LoopedBFS and
            InterleavedZeroBubble several, dealt round; ZBVZeroBubble and DualPipeV two, rank r the stages r and 2 pp -
            1 - r, so that the first and the last are on rank 0. Or a CSV file, beside the manifest, of a schedule of
            one's own, as torch has them: a row a rank, in it `2F0` for the forward of micro-batch 0 on stage 2, B for
            its backward, or I and W for the gradients of inputs and of weights.
        stages_per_rank: Default: what the schedule has; 2 where it may be any number from 2.
        split: `auto` makes the costliest stage as cheap as can be, in floating-point operations, those of embeddings
            and head counted; of such splits the one whose fullest stage needs least memory, parameters and the
            activations of all micro-batches in flight there. Or the FQNs of the blocks that begin the second and every
            further stage. `tracer` traces values whatever the blocks look like; `{ tracer = [...] }` begins stages
            at the calls named, of blocks or of any modules (`decoder`), where `layers.1@2` is the third call of
            layers.1.
    """

    schedule: ScheduleName | _CsvFile = "1F1B"
    stages_per_rank: int | None = Field(default=None, ge=1)
    split: Literal["auto", "tracer"] | tuple[str, ...] | dict[Literal["tracer"], tuple[str, ...]] = "auto"

    def _schedule(self, context: RunContext) -> NamedSchedule | CustomSchedule:
        """Return the schedule; a file is read once."""
        degree = context.degrees["pp"]
        if self.schedule in RULES:
            per_rank = self.stages_per_rank or (1 if RULES[self.schedule].placement == "one" else 2)
            return NamedSchedule(name=self.schedule, degree=degree, per_rank=per_rank)
        key = (self, "file")
        if key not in context.state:
            path = context.manifest.document.folder / self.schedule
            context.state[key] = read_schedule(path, degree=degree, name=self.schedule)
        schedule: CustomSchedule = context.state[key]
        return schedule

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        stages = self.stages_per_rank or (1 if self.schedule in ("1F1B", "GPipe") else 2)
        return LayoutTraits(schedule=str(self.schedule), stages_per_rank=stages)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse stages that the schedule does not have, and too few micro-batches where their number is stated."""
        if self.schedule in RULES:
            self._refuse_placement()
        if context.degrees["pp"] == 1:
            return
        schedule = self._schedule(context)
        if self.stages_per_rank not in (None, schedule.per_rank):
            raise PluginError(f"{self.schedule} has {schedule.per_rank} stages a rank, not {self.stages_per_rank}")
        train, num_microbatches = context.manifest.train, self._num_microbatches(context)
        if num_microbatches is None:
            return
        self._refuse_too_few(
            context,
            num_microbatches,
            f"[train] {train.batch_key} = {train.accumulate or train.global_batch} over {context.data_parallel_degree} "
            f"data-parallel ranks makes {num_microbatches} micro-batches of {train.microbatch}",
        )

    @staticmethod
    def _num_microbatches(context: RunContext) -> int | None:
        train = context.manifest.train
        if train.batch_key is None or train.microbatch is None:
            return None
        # Of a rank with one piece of the batch, the fewest.
        return int(train.num_microbatches(pieces_of(context).total * context.layout.num_groups))

    def _refuse_placement(self) -> None:
        placement, stated = RULES[self.schedule].placement, self.stages_per_rank
        if stated is not None and placement == "one" and stated != 1:
            raise PluginError(
                f"{self.schedule} has one stage a rank, not {stated}",
                hint='schedules of several are "Interleaved1F1B" and others',
            )
        if stated is not None and placement == "v" and stated != 2:
            raise PluginError(f"{self.schedule} has two stages a rank, not {stated}")
        if stated == 1 and placement == "loop":
            raise PluginError(f"{self.schedule} has several stages a rank, not 1", hint='write schedule = "1F1B"')

    def _refuse_too_few(self, context: RunContext, num_microbatches: int, what: str) -> None:
        reason = self._schedule(context).refusal(num_microbatches)
        if reason is not None:
            raise PluginError(f"{what}, and {self.schedule} {reason}")

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform | None:
        """Trace the model and choose the blocks that begin stages; `composer3d_split` then builds the stages."""
        if context.degrees["pp"] == 1:
            return None
        splits_backward = self._schedule(context).splits_backward
        return Transform(
            # Others may exclude the second name: what it needs, they may not be able to give.
            name="zero_bubble_pipeline" if splits_backward else "pipeline",
            phase=Phase.SPLIT,
            select=self._select,
            apply=lambda model, fqns, context: fqns,
            uses=("pp",),
            conflicts={
                "compile": f"{self.schedule} runs the gradients of inputs and of weights apart, which torch cannot do "
                "with compiled blocks"
            }
            if splits_backward
            else {},
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        from composer3d_plugins.scheduling.pipeline.random_calls import refuse_random_calls
        from composer3d_plugins.scheduling.pipeline.split_choice import divide

        blocks = select_fqns(context.blocks, context.fqns) if context.has_blocks else ()
        refuse_random_calls(model, blocks, context.example)
        division = divide(
            model,
            blocks,
            context.example,
            partial(self._cuts, context),
            num_stages=context.degrees["pp"] * self._schedule(context).per_rank,
            is_traced=self.split == "tracer" or isinstance(self.split, dict),
            is_stated=context.manifest.model.blocks is not None,
            beginnings=[name.partition("@")[0] for name in self._beginnings()],
            findings=context.stash(ModelFindings),
        )
        context.state[self] = _Memory(division=division)
        context.stash(WarmUp).can_be_shorter = self.schedule == "1F1B"
        self._describe(division, model, context)
        return list(division.blocks)

    def _describe(self, division: Division[Any], model: nn.Module, context: RunContext) -> None:
        trained = {fqn for fqn, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        schedule, forms = self._schedule(context), context.stash(StageForms)
        forms.of_ranks = tuple(tuple(sorted(schedule.stages_of(rank))) for rank in range(context.degrees["pp"]))
        forms.received = tuple(division.received(stage, trained) for stage in range(division.num_stages))
        forms.calls = tuple(division.calls(stage) for stage in range(division.num_stages))

    def _beginnings(self) -> tuple[str, ...]:
        return self.split["tracer"] if isinstance(self.split, dict) else ()

    def _cuts(self, context: RunContext, places: Sequence[str], load: Load) -> Sequence[int]:
        """Return the indices of the places, among those where a stage can begin, where one does."""
        per_rank = self._schedule(context).per_rank
        num_stages = context.degrees["pp"] * per_rank
        if len(places) < num_stages:
            raise PluginError(
                f"pp = {context.degrees['pp']} with {per_rank} stage{'s' * (per_rank > 1)} a rank makes "
                f"{num_stages} stages, and the model calls blocks {len(places)} times ({_range(places)}); every stage "
                "needs one"
            )
        stated = self._stated_starts(places, num_stages)
        return stated or balance(load, num_stages=num_stages, in_flight=self._in_flight(context))

    def _in_flight(self, context: RunContext) -> list[int]:
        """Return, by stage, the peak of micro-batches in flight, for as many as [train] makes; else for many."""
        schedule, degree = self._schedule(context), context.degrees["pp"]
        num_stages = degree * schedule.per_rank
        num_microbatches = min(self._num_microbatches(context) or 2 * num_stages, _MANY_MICROBATCHES)
        orders = self._orders(schedule, degree, num_microbatches)
        return peak_in_flight((action for order in orders for action in order), num_stages)

    def _stated_starts(self, blocks: Sequence[str], num_stages: int) -> list[int] | None:
        if isinstance(self.split, str):
            return None
        split = self.split["tracer"] if isinstance(self.split, dict) else self.split
        if len(split) != num_stages - 1:
            raise PluginError(
                f"split names {len(split)} blocks, and {num_stages} stages have {num_stages - 1} beginnings "
                "besides the first"
            )
        positions = {fqn: index for index, fqn in enumerate(blocks)}
        starts = [0]
        for fqn in split:
            if fqn not in positions:
                raise PluginError(f'split names "{fqn}", which is no block; blocks are {blocks[0]} to {blocks[-1]}')
            if positions[fqn] <= starts[-1]:
                raise PluginError(f'split names "{fqn}" out of order, or leaves a stage without a block')
            starts.append(positions[fqn])
        return starts

    @hookimpl
    def composer3d_split(self, context: RunContext, model: nn.Module) -> Split | None:
        """Copy the model's structure once for each of this rank's stages."""
        if context.degrees["pp"] == 1:
            return None
        from composer3d_plugins.scheduling.pipeline.surgery import runner_of

        division: Division[Any] = context.state[self].division
        mine = self._schedule(context).stages_of(context.coordinates["pp"])
        names = {fqn: tied for tied in context.ties for fqn in tied}
        parts: list[Part] = []
        for index in sorted(mine):
            later = [fqn for fqn in division.parameters if index in division.holders(fqn)[1:]]
            clones = [fqn for fqn in later if any(part.index in division.holders(fqn) for part in parts)]
            module = division.build(model, index, clones=clones, device=context.device)
            runner_of(module).given = partial(context.stash(ReceivedValues).given, module)
            parts.append(
                Part(
                    module=module,
                    index=index,
                    num_stages=division.num_stages,
                    copies=frozenset(name for fqn in later for name in names.get(fqn, (fqn,))),
                    called_elsewhere=division.called_elsewhere(index),
                )
            )
        return Split(parts=tuple(parts), keep_unsharded=self._schedule(context).splits_backward)

    @hookimpl
    def composer3d_schedule(
        self, context: RunContext, parts: Sequence[Part], loss_fn: Callable[[Any, Any], Any]
    ) -> Schedule | None:
        """Return the runtime of torch's schedule over the stages."""
        if context.degrees["pp"] == 1:
            return None
        from composer3d_plugins.scheduling.pipeline.runtime import PipelineRuntime
        from composer3d_plugins.scheduling.pipeline.shared_parameters import Ties

        memory: _Memory = context.state[self]
        holders = {fqn: memory.division.holders(fqn) for fqn in memory.division.parameters}
        runtime = PipelineRuntime(context=context, parts=parts, loss_fn=loss_fn, schedule=self._schedule(context))
        memory.ties = Ties(
            context=context,
            parts=parts,
            holders={fqn: stages for fqn, stages in holders.items() if len(stages) > 1},
            owner=runtime.owner,
        )
        return runtime

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        """Keep the replicas of tied parameters equal."""
        if context.degrees["pp"] == 1:
            return []
        memory: _Memory = context.state[self]

        def ties() -> Ties:
            assert memory.ties is not None, "made with the schedule"
            return memory.ties

        return [
            StepAction(
                name="pipeline.ties", point=reducing_point(context), run=lambda state: ties().sum_gradients(state)
            ),
            StepAction(name="pipeline.sums", point=StepPoint.BEFORE_MICROBATCH, run=lambda state: ties().take_apart()),
            StepAction(
                name="pipeline.copies", point=StepPoint.PARAMETERS_FINAL, run=lambda state: ties().fill_copies(state)
            ),
        ]

    @hookimpl
    def composer3d_actions(self, context: RunContext, num_microbatches: int) -> list[list[Action]] | None:
        """List what every rank along pp runs, in its order."""
        degree = context.degrees["pp"]
        if degree == 1:
            return None
        self._refuse_too_few(context, num_microbatches, f"there are {num_microbatches} micro-batches")
        orders = self._orders(self._schedule(context), degree, num_microbatches)
        return [[Action(stage=stage, kind=kind, microbatch=index) for stage, kind, index in order] for order in orders]

    @staticmethod
    def _orders(
        schedule: NamedSchedule | CustomSchedule, degree: int, num_microbatches: int
    ) -> Sequence[Sequence[tuple[int, Any, int]]]:
        """Return what every rank along pp runs, as (stage, kind, micro-batch)."""
        if isinstance(schedule, CustomSchedule):
            return schedule.orders
        if not schedule.has_one_stage:
            return torch_compat.pipeline_orders(schedule.name, degree, num_microbatches, schedule.per_rank)
        return [
            [
                (rank, kind, index)
                for kind, index in order_of_one_stage(
                    schedule.name, rank, degree=degree, num_microbatches=num_microbatches
                )
            ]
            for rank in range(degree)
        ]
