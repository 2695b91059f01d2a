"""The time of a step from its trace: roofline, collectives, pipeline; and what follows from it.

Pure functions of traces and a described cluster. No constant here is of a model, a layout or a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from composer3d.errors import ComposerError
from composer3d.interfaces import Action
from composer3d.planning.costs.collective_time import transfer_s
from composer3d.planning.costs.figure import Figure, Provenance
from composer3d.planning.costs.offload_time import OffloadTerm, offload_notes, offload_terms
from composer3d.planning.costs.roofline import peak_of
from composer3d.planning.costs.step_time import Communication, SegmentTime, communication_of, segment_time
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.schedules.simulation import Simulation, StageCosts, simulate
from composer3d.planning.tracing.traced import RankTrace, Segment

__all__ = ["Estimate", "PipelineTime", "estimate"]

# Where a hardware file's stack states no band, and of a machine that was measured.
_ASSUMED_BAND, _CALIBRATED_BAND = 0.25, 0.15
_ROUTED = (
    2  # times as wide are the bounds of a model that routes: ranks are sent unequal rows, experts differ in kernels
)
_KINDS = {"F": "forward", "B": "backward", "I": "input_backward", "W": "weight_backward"}
_SHARES = {"I": 0.5, "W": 0.5}  # of a whole backward, where the trace has it whole


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """A pipeline's step.

    Args:
        bubble_share: Idle time as a part of the step's forwards and backwards.
        bubble_relative: Idle time relative to computing.
        in_flight: Micro-batches whose activations a rank holds at most, by rank.
        stage_s: Forward and backward of one micro-batch by stage.
        imbalance: The slowest stage over the mean stage, less 1.
        simulation: Its cells, for drawing; times in seconds.
    """

    bubble_share: Figure
    bubble_relative: Figure
    in_flight: tuple[float, ...]
    stage_s: tuple[float, ...]
    imbalance: float
    simulation: Simulation


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time of an optimizer step, of the ranks that take longest.

    Args:
        step_s: All of it.
        compute_s: Operators.
        exposed_s: Communication that compute does not hide.
        bubble_s: Waiting for other stages.
        optimizer_s: The optimizer, within `compute_s`.
        tokens_per_s: Of the whole world.
        tokens_per_s_per_device: Of one rank.
        mfu: Model FLOPs by the named convention over the peak.
        hfu: FLOPs that are executed, recomputation included, over the peak.
        convention: In which the model's FLOPs are counted.
        peak_flops: Of one device, that MFU and HFU refer to.
        pipeline: None without one.
        communication: Of the rank that takes longest.
        offloading: What offloading moves and computes on that rank.
        notes: What a reader has to know.
    """

    step_s: Figure
    compute_s: Figure
    exposed_s: Figure
    bubble_s: Figure
    optimizer_s: Figure
    tokens_per_s: Figure
    tokens_per_s_per_device: Figure
    mfu: Figure | None
    hfu: Figure
    convention: str
    peak_flops: float
    pipeline: PipelineTime | None
    communication: tuple[Communication, ...]
    offloading: tuple[OffloadTerm, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _RankTime:
    compute_s: float
    exposed_s: float
    optimizer_s: float
    flops: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


def estimate(
    traces: Sequence[RankTrace],
    hardware: Hardware,
    *,
    world_size: int,
    tokens: int,
    model_flops: float | None = None,
    convention: str = "palm",
    dtype: str = "bfloat16",
    orders: Sequence[Sequence[Action]] | None = None,
) -> Estimate:
    """Model the time of one optimizer step.

    Without a pipeline the slowest rank's segments follow each other. With one, forwards and backwards run in the
    schedule's order with what each stage takes; reductions and the optimizer follow.

    Args:
        traces: One for every kind of rank; with a pipeline one for every stage, or at least for first, inner and last.
        hardware: The cluster; its `devices_per_node` says which ranks share a node.
        world_size: Ranks.
        tokens: Of the global batch of one optimizer step.
        model_flops: Of forward and backward of one token, by `convention`; None where they are not known.
        convention: How they were counted.
        dtype: Whose peak utilisation refers to.
        orders: Actions by rank along the pipeline; None without one.

    Raises:
        ComposerError: There is no trace, or the order cannot run.
    """
    if not traces:
        raise ComposerError("there is no traced rank to time")
    stated, hardware = hardware, hardware.shared_by(world_size)
    segments = _SegmentTimes(hardware)
    times = [_rank_time(trace.segments, segments) for trace in traces]
    slowest = max(range(len(traces)), key=lambda index: times[index].total_s)
    pipeline, chosen, bubble_s = None, times[slowest], 0.0
    if orders is not None:
        pipeline, chosen, bubble_s = _pipelined(traces, segments, orders)
    known: Provenance = "calibrated" if hardware.known == "calibrated" else "modelled"
    band = _band(hardware) * (_ROUTED if any(map(_routes, traces)) else 1)
    step = Figure.within(chosen.total_s + bubble_s, band, known)
    peak = peak_of(dtype, hardware.device)
    rate = step.inverse(float(tokens))
    return Estimate(
        step_s=step,
        compute_s=Figure.within(chosen.compute_s, band, known),
        exposed_s=Figure.within(chosen.exposed_s, 2 * band, known),
        bubble_s=Figure.within(bubble_s, band, known),
        optimizer_s=Figure.within(chosen.optimizer_s, band, known),
        tokens_per_s=rate,
        tokens_per_s_per_device=rate.scaled(1 / world_size),
        mfu=None if model_flops is None else rate.scaled(model_flops / world_size / peak),
        hfu=step.inverse(_mean_flops(traces, times) / peak),
        convention=convention,
        peak_flops=peak,
        pipeline=pipeline,
        communication=communication_of(traces[slowest].segments, hardware),
        offloading=offload_terms(traces[slowest].segments, hardware),
        notes=_notes(stated, traces, dtype),
    )


def _band(hardware: Hardware) -> float:
    return _CALIBRATED_BAND if hardware.known == "calibrated" else hardware.software.band or _ASSUMED_BAND


def _routes(trace: RankTrace) -> bool:
    """Return whether a forward chooses by value, as a router does."""
    calls = (call.name for segment in trace.segments if segment.kind == "forward" for call in segment.operators)
    return "aten.topk" in calls


class _SegmentTimes:
    """Times of segments on a cluster, each computed once: an estimate asks for those of a pipeline's stages again."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._found: dict[int, SegmentTime] = {}  # by identity: traces keep their segments

    def of(self, segment: Segment) -> SegmentTime:
        found = self._found.get(id(segment))
        if found is None:
            found = self._found[id(segment)] = segment_time(segment, self.hardware)
        return found


def _rank_time(segments: Sequence[Segment], known: _SegmentTimes) -> _RankTime:
    pairs = [(segment, known.of(segment)) for segment in segments]
    return _RankTime(
        compute_s=math.fsum(time.compute_s * segment.count for segment, time in pairs),
        exposed_s=math.fsum(time.exposed_s * segment.count for segment, time in pairs),
        optimizer_s=math.fsum(time.compute_s * segment.count for segment, time in pairs if segment.kind == "optimizer"),
        flops=math.fsum(time.flops * segment.count for segment, time in pairs),
    )


def _mean_flops(traces: Sequence[RankTrace], times: Sequence[_RankTime]) -> float:
    """Return what a rank executes on average over those that the traces stand for."""
    ranks = sum(trace.stands_for for trace in traces)
    return math.fsum(time.flops * trace.stands_for for time, trace in zip(times, traces, strict=True)) / ranks


def _pipelined(
    traces: Sequence[RankTrace], known: _SegmentTimes, orders: Sequence[Sequence[Action]]
) -> tuple[PipelineTime, _RankTime, float]:
    """Simulate the forwards and backwards; add what every rank does after them."""
    num_stages = 1 + max(action.stage for order in orders for action in order)
    stages = _times_by_stage(num_stages, traces, known)
    kinds = {action.kind for order in orders for action in order}
    costs: dict[tuple[int, str], float] = {
        (stage, kind): _action_time(kind, times).total_s for stage, times in stages.items() for kind in kinds
    }
    result = simulate(orders, StageCosts(stages=costs, transfer=_message_s(traces, known.hardware)))
    after = max(
        (_rank_time([s for s in trace.segments if s.kind in ("gradients", "optimizer")], known) for trace in traces),
        key=lambda time: time.total_s,
    )
    busy = max(range(len(orders)), key=lambda rank: result.busy[rank])
    parts = [_action_time(action.kind, stages[action.stage]) for action in orders[busy]]
    chosen = replace(
        after,
        compute_s=after.compute_s + math.fsum(part.compute_s for part in parts),
        exposed_s=after.exposed_s + math.fsum(part.exposed_s for part in parts),
    )
    stage_s = tuple(
        sum(costs[stage, kind] for kind in (("F", "B") if "B" in kinds else ("F", "I", "W")) if kind in kinds)
        for stage in range(num_stages)
    )
    pipeline = PipelineTime(
        bubble_share=_points(result.bubble_share),
        bubble_relative=_points(result.bubble_relative),
        in_flight=result.in_flight,
        stage_s=stage_s,
        imbalance=max(stage_s) * num_stages / math.fsum(stage_s) - 1,
        simulation=result,
    )
    return pipeline, chosen, result.total - result.busy[busy]


def _points(value: float) -> Figure:
    """Return a share, which differs from measured ones by up to two points."""
    return Figure(value=value, known="modelled", low=max(0.0, value - 0.02), high=value + 0.02)


def _times_by_stage(
    num_stages: int, traces: Sequence[RankTrace], known: _SegmentTimes
) -> dict[int, Mapping[str, SegmentTime]]:
    """Return the times of every stage's segments by kind; one that was not traced is as the nearest inner one."""
    held = sorted({segment.stage for trace in traces for segment in trace.segments if segment.kind == "forward"})
    inner = [other for other in held if 0 < other < num_stages - 1]
    times = {stage: _stage_times(stage, traces, known) for stage in held}
    near = {stage: min(inner or held, key=lambda other: abs(other - stage)) for stage in range(num_stages)}
    return {stage: times[stage if stage in held else near[stage]] for stage in range(num_stages)}


def _stage_times(stage: int, traces: Sequence[RankTrace], known: _SegmentTimes) -> Mapping[str, SegmentTime]:
    found: dict[str, list[tuple[int, SegmentTime]]] = {}
    for trace in traces:
        for segment in trace.segments:
            if segment.stage == stage and segment.kind in _KINDS.values():
                found.setdefault(segment.kind, []).append((segment.count, known.of(segment)))
    return {kind: _mean(times) for kind, times in found.items()}


def _mean(times: Sequence[tuple[int, SegmentTime]]) -> SegmentTime:
    """Return the mean over repetitions: a first micro-batch that gathers parameters is one of them."""
    total = sum(count for count, _ in times)
    return SegmentTime.sum_of((count / total, time) for count, time in times)


def _action_time(kind: str, times: Mapping[str, SegmentTime]) -> SegmentTime:
    """Return the time of an action; halves of a backward that was traced whole are halves of its time."""
    found = times.get(_KINDS[kind])
    if found is not None:
        return found
    if kind == "B":
        return SegmentTime.sum_of((1, times[name]) for name in ("input_backward", "weight_backward"))
    return SegmentTime.sum_of([(_SHARES[kind], times["backward"])])


def _message_s(traces: Sequence[RankTrace], hardware: Hardware) -> float:
    """Return the time of the longest message between stages."""
    messages = [
        transfer_s(transfer, hardware)
        for trace in traces
        for segment in trace.segments
        for transfer in segment.transfers
        if transfer.op in ("send", "receive")
    ]
    return max(messages, default=0.0)


def _notes(hardware: Hardware, traces: Sequence[RankTrace], dtype: str) -> tuple[str, ...]:
    notes = []
    if dtype not in hardware.device.peaks:
        notes.append(f"{hardware.device.name} computes no {dtype}: times are those of a wider dtype")
    if hardware.known == "assumed":
        stack = "" if hardware.runs_on is None else f" under the stack {hardware.runs_on}"
        band, measures = hardware.software.band, "composer3d calibrate measures a machine"
        told = (
            f"bounds of times are assumed, too few published runs are of {hardware.device.name}{stack}"
            if band is None
            else f"nine of ten published runs of {hardware.device.name}{stack} that no constant saw took between the "
            f"planned time / {1 + band:.2f} and x {1 + band:.2f}: the bounds of times"
        )
        notes.append(f"{told}; {measures}")
    if any(map(_routes, traces)):
        notes.append(
            f"bounds of times are {_ROUTED} times as wide as those of a model that routes nothing: published runs that "
            "they stand on are of dense models"
        )
    return (*notes, *offload_notes((segment for trace in traces for segment in trace.segments), hardware))
