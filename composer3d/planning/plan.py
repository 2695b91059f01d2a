"""`plan`: what a manifest costs on every kind of rank, before a rank exists."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError
from composer3d.planning.costing import advice_on, time_of
from composer3d.planning.costs.allocator import Allocation, Verdict, allocate, judge
from composer3d.planning.costs.pipeline_time import PipelinePlan, plan_pipeline
from composer3d.planning.costs.whole_run import Questions
from composer3d.planning.schedules.simulation import Costs, peak_held, simulate
from composer3d.planning.tracing.rank_roles import RankChoice, chosen_ranks
from composer3d.planning.tracing.rank_tracer import Tracer
from composer3d.planning.tracing.trace_cache import remembered, trace_key
from composer3d.planning.tracing.traced import RankTrace

if TYPE_CHECKING:
    from composer3d.interfaces import Action
    from composer3d.mesh import Layout
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.tracing.fake_composition import Job

__all__ = ["Bubble", "Plan", "RankPlan", "enough_microbatches", "make_plan"]

# Without a pipeline the first micro-batch makes gradients, the last one may reduce them, and one is neither.
_ALONE = 3
OrdersOf = Callable[[int], "Sequence[Sequence[Action]] | None"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPlan:
    """One rank, and all that do the same.

    Args:
        trace: Its step.
        allocation: What that needs of a GPU.
        verdict: Whether it fits; None where no memory was named.
    """

    trace: RankTrace
    allocation: Allocation
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """What a pipeline loses.

    Args:
        share: Idle time as a part of a step's forwards and backwards.
        relative: Idle time relative to computing.
        imbalance: The costliest stage over the mean of all, less 1.
        is_timed: Whether stages cost their times, and not their FLOPs.
    """

    share: float
    relative: float
    imbalance: float
    is_timed: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a manifest costs.

    Args:
        layout: Of its world.
        schedule: The name of its pipeline's schedule; None without one.
        ranks: The one with the highest peak first.
        pipeline: What the pipeline loses; None without one.
        num_microbatches: Of a step, on every data-parallel rank.
        gpus_per_node: As in `[mesh]`; None where it does not say.
        memory_bytes: Of a device; None where none was named.
        time: What the time model says, ready for JSON; None without hardware.
        advice: What is wrong with the layout on the hardware.
        notes: What a reader has to know.
    """

    layout: Layout
    schedule: str | None
    ranks: tuple[RankPlan, ...]
    pipeline: PipelinePlan | None
    num_microbatches: int
    gpus_per_node: int | None
    memory_bytes: int | None
    time: Mapping[str, Any] | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def bubble(self) -> Bubble | None:
        """What the pipeline loses, by the stages' times where hardware is named, else by their FLOPs."""
        if self.pipeline is None:
            return None
        if self.time is not None and "pipeline" in self.time:
            timed = self.time["pipeline"]
            share, relative = (timed[name]["value"] for name in ("bubble_share", "bubble_relative"))
            return Bubble(share=share, relative=relative, imbalance=timed["imbalance"], is_timed=True)
        schedule = self.pipeline.schedule
        return Bubble(
            share=schedule.bubble_share,
            relative=schedule.bubble_relative,
            imbalance=self.pipeline.imbalance,
            is_timed=False,
        )

    @property
    def verdict(self) -> Verdict | None:
        """The worst of the ranks' verdicts."""
        verdicts = [rank.verdict for rank in self.ranks if rank.verdict is not None]
        order: list[Verdict] = ["fits", "tight", "does not fit"]
        return max(verdicts, key=order.index, default=None)


def make_plan(
    job: Job,
    layout: Layout,
    *,
    orders_of: OrdersOf,
    schedule: str | None = None,
    choice: RankChoice = "worst",
    memory_bytes: int | None = None,
    hardware: Hardware | None = None,
    asked: Questions | None = None,
    extrapolate: bool = True,
) -> Plan:
    """Trace the chosen ranks and say what they cost.

    Args:
        job: A manifest with its model, batch, loss and optimizer.
        layout: Of its world.
        orders_of: Gives the pipeline's actions for a number of micro-batches, by rank along its axis; None without one.
        schedule: The name of the pipeline's schedule.
        choice: The ranks to trace; see `chosen_ranks`.
        memory_bytes: Of a device; None takes what the hardware's has, if there is one.
        hardware: The cluster; None leaves time out.
        asked: Of the whole run, and of another cluster.
        extrapolate: Trace repeated blocks at two depths, where the rest follows from them.

    Raises:
        ComposerError: What cannot be composed, or a rank that there is not.
    """
    orders = orders_of(job.num_microbatches)
    simulation = None if orders is None else simulate(orders, Costs())
    enough = partial(enough_microbatches, orders_of, job.num_microbatches)
    tracer = Tracer(job, extrapolate=extrapolate, enough=lambda position: enough(position=position))
    chosen = chosen_ranks(layout, simulation, choice, tracer.contents() if choice == "worst" else ())
    traces = remembered(
        lambda: trace_key(tracer.job, chosen, extrapolate=extrapolate), lambda: tracer.trace_all(chosen)
    )
    if hardware is not None:
        hardware = hardware.with_nodes(job.manifest.mesh.gpus_per_node).with_stack(tracer.stack)
        memory_bytes = memory_bytes or hardware.device.memory_bytes
    ranks = _allocated(traces, hardware, memory_bytes)
    fullest = max(ranks, key=lambda rank: rank.allocation.total)
    return Plan(
        layout=layout,
        schedule=schedule,
        ranks=tuple(ranks),
        pipeline=None if orders is None else plan_pipeline(orders, traces),
        num_microbatches=job.num_microbatches,
        gpus_per_node=job.manifest.mesh.gpus_per_node,
        memory_bytes=memory_bytes,
        time=None
        if hardware is None
        else time_of(traces, job, layout, hardware, orders=orders, asked=asked or Questions()),
        advice=()
        if hardware is None
        else advice_on(fullest.trace, job, layout, hardware, memory_bytes or 0, total_bytes=fullest.allocation.total),
        notes=_notes(traces, hardware, memory_bytes),
    )


def _allocated(traces: Sequence[RankTrace], hardware: Hardware | None, memory_bytes: int | None) -> list[RankPlan]:
    """Return what ranks need of a device and whether they fit, the one with the highest peak first."""
    ranks = []
    for trace in sorted(traces, key=lambda trace: -trace.memory.peak):
        allocation = allocate(trace, None if hardware is None else hardware.device)
        verdict = None if memory_bytes is None else judge(allocation, memory_bytes)
        ranks.append(RankPlan(trace=trace, allocation=allocation, verdict=verdict))
    return ranks


def enough_microbatches(orders_of: OrdersOf, num_microbatches: int, *, position: int | None = None) -> int:
    """Return the fewest micro-batches after which every further one only repeats what others do.

    A rank holds no fewer of more micro-batches, so that few numbers have to be looked at: time grows as the number
    does for GPipe, which holds all of them, and for the others with one list of actions.

    Args:
        orders_of: As for `make_plan`.
        num_microbatches: Of the step.
        position: Of the rank along the pipeline that it is asked for; default: for all of them.
    """
    orders = orders_of(num_microbatches)
    if orders is None:
        return min(num_microbatches, _ALONE)
    # Of schedules of several stages a rank, torch runs whole rounds of micro-batches.
    has_one_stage = len({action.stage for action in orders[0]}) == 1
    step = 1 if has_one_stage else len(orders)
    fewest, own = len(orders) + step, slice(None)
    if has_one_stage and position is not None:
        # A rank holds as many as it ever will, one more follows, and behind the first rank one more is received.
        fewest = max(_ALONE, peak_held(orders[position]) + (1 if position == 0 else 2))
        own = slice(position, position + 1)
    held = [peak_held(order) for order in orders[own]]

    def is_enough(number: int) -> bool:
        try:
            fewer = orders_of(number)
        except ComposerError:  # too few for the schedule, or none but its own
            return False
        return fewer is not None and [peak_held(order) for order in fewer[own]] == held

    return _first(range(fewest, num_microbatches, step), is_enough) or num_microbatches


def _first(numbers: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """Return the first of rising numbers from which something holds on; it is asked of few, and of small ones first."""
    if not numbers or not holds(numbers[-1]):
        return None
    low, high = 0, 1
    while high < len(numbers) and not holds(numbers[high - 1]):
        low, high = high, 2 * high
    return numbers[bisect.bisect_left(numbers, True, low, min(high, len(numbers)) - 1, key=holds)]


def _notes(traces: Sequence[RankTrace], hardware: Hardware | None, memory_bytes: int | None) -> tuple[str, ...]:
    notes = [
        "kernels are those of the CPU: flash attention's workspaces and fused kernels of a GPU may differ a little"
    ]
    if any(trace.is_extrapolated for trace in traces):
        notes.append("repeated blocks were traced at two depths, and the rest follows from them")
    if hardware is None:
        notes.append("no time: no hardware was named (--hardware)")
    if memory_bytes is None:
        notes.append("no verdict: no memory was named (--memory 80GiB)")
    notes += [note for trace in traces for note in trace.notes]
    return tuple(dict.fromkeys(notes))
