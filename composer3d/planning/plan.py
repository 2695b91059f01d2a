"""`plan`: what a manifest costs on every kind of rank, before a rank exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from composer3d.planning.costing import advice_on, time_of
from composer3d.planning.costs.allocator import Allocation, Verdict, allocate, judge
from composer3d.planning.costs.pipeline_time import PipelinePlan, plan_pipeline
from composer3d.planning.costs.whole_run import Questions
from composer3d.planning.traced_manifest import TracedManifest
from composer3d.planning.tracing.summary import sent_over
from composer3d.planning.tracing.traced import RankTrace

if TYPE_CHECKING:
    from composer3d.mesh import Layout
    from composer3d.planning.hardware.cluster import Hardware

__all__ = ["Bubble", "Plan", "RankPlan", "plan_of"]


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
    """Losses of a pipeline.

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
    """Costs of a manifest.

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
        """Loss of the pipeline, by the stages' times where hardware is named, else by their FLOPs."""
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


def plan_of(
    traced: TracedManifest,
    *,
    memory_bytes: int | None = None,
    hardware: Hardware | None = None,
    asked: Questions | None = None,
) -> Plan:
    """Return what a traced manifest costs.

    Args:
        traced: All that is known of it.
        memory_bytes: Of a device; None takes what the hardware's has, if there is one.
        hardware: The cluster; None leaves time out.
        asked: Of the whole run, and of another cluster.

    Raises:
        ComposerError: A part of the cluster that there is not; failures so frequent that nothing would be kept.
    """
    if hardware is not None and hardware.device.kind != traced.device:
        gloo = hardware.device.kind == "cpu"
        traced = replace(traced, traces=tuple(sent_over(trace, gloo=gloo) for trace in traced.traces))
    traces = traced.traces
    if hardware is not None:
        hardware = hardware.with_nodes(traced.gpus_per_node).with_stack(traced.stack)
        memory_bytes = memory_bytes or hardware.device.memory_bytes
    ranks = _allocated(traces, hardware, memory_bytes)
    fullest = max(ranks, key=lambda rank: rank.allocation.total)
    time: Mapping[str, Any] | None = None
    advice: tuple[str, ...] = ()
    if hardware is not None:
        time = time_of(traced, hardware, asked=asked or Questions())
        advice = advice_on(fullest.trace, traced, hardware, memory_bytes or 0, total_bytes=fullest.allocation.total)
    return Plan(
        layout=traced.layout,
        schedule=traced.schedule,
        ranks=tuple(ranks),
        pipeline=None if traced.orders is None else plan_pipeline(traced.orders, traces),
        num_microbatches=traced.num_microbatches,
        gpus_per_node=traced.gpus_per_node,
        memory_bytes=memory_bytes,
        time=time,
        advice=advice,
        notes=(*_notes(traced, hardware, memory_bytes), *traced.notes),
    )


def _allocated(traces: Sequence[RankTrace], hardware: Hardware | None, memory_bytes: int | None) -> list[RankPlan]:
    """Return what ranks need of a device and whether they fit, the one with the highest peak first."""
    ranks = []
    for trace in sorted(traces, key=lambda trace: -trace.memory.peak):
        allocation = allocate(trace, None if hardware is None else hardware.device)
        verdict = None if memory_bytes is None else judge(allocation, memory_bytes)
        ranks.append(RankPlan(trace=trace, allocation=allocation, verdict=verdict))
    return ranks


def _notes(traced: TracedManifest, hardware: Hardware | None, memory_bytes: int | None) -> tuple[str, ...]:
    traces = traced.traces
    notes = [
        "kernels are those of the CPU: flash attention's workspaces and fused kernels of a GPU may differ a little"
    ]
    if any(trace.is_extrapolated for trace in traces):
        notes.append("repeated blocks were traced at two depths, and the rest follows from them")
    if hardware is None and traced.device == "cpu" and any(map(_reduces_and_scatters, traces)):
        notes.append(
            "bytes on the wire are those of a run on CPUs, where gloo's reduce-scatter is an all-reduce inside; "
            '--hardware, or [run] device = "cuda", counts those of GPUs'
        )
    if hardware is None:
        notes.append("no time: no hardware was named (--hardware)")
    if memory_bytes is None:
        notes.append("no verdict: no memory was named (--memory 80GiB)")
    notes += [note for trace in traces for note in trace.notes]
    return tuple(dict.fromkeys(notes))


def _reduces_and_scatters(trace: RankTrace) -> bool:
    return any(transfer.op == "reduce_scatter" for segment in trace.segments for transfer in segment.transfers)
