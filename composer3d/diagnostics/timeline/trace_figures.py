"""Figures of a trace: each rank's time by activity, the straggler, the pipeline's bubble beside the simulated one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from composer3d.diagnostics.timeline.trace_files import Span, Trace
from composer3d.interfaces import Action
from composer3d.planning import Costs, simulate
from composer3d.planning.reports import size

__all__ = ["Bubble", "RankTimes", "Report", "Traffic", "measure", "statements"]

_COMPUTING = frozenset({"forward", "backward", "backward_input", "backward_weight"})
_SLOW = 1.1  # how much longer than the mean of the others a rank must compute to be called a straggler


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Seconds a step that a rank spends on each kind of work, in the mean.

    Args:
        step: Of the step, from its first span to its last.
        computing: Forward and backward, without the collectives inside.
        collectives: In which this rank did nothing else: the exposed communication, waiting for others included.
        optimizer: In spans of the optimizer step.
        data_wait: Before the step.
    """

    step: float
    computing: float
    collectives: float
    optimizer: float
    data_wait: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind over one axis that a rank sends, a step, in the mean.

    An `exchange` of a pipeline is messages both ways.

    Args:
        op: The collective.
        axis: Of the mesh.
        count: Number of them.
        bytes: Of their payloads, as `plan` counts them: encoded where a codec encodes them, the whole result of an
            all-gather, the input of any other.
    """

    op: str
    axis: str
    count: float
    bytes: float

    def __str__(self) -> str:
        return f"{self.op} over {self.axis}, {self.count:g} of {size(self.bytes)} in all"


@dataclass(frozen=True, kw_only=True)
class Bubble:
    """Idle time of a pipeline between its first forward and its last backward, as a part of that time.

    Args:
        measured: Over all measured steps.
        simulated: Of the same order of actions with the mean times that they took, and messages that take none.
    """

    measured: float
    simulated: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a trace.

    Args:
        steps: Numbers of the steps that were measured: all but the first, which allocates and compiles.
        ranks: Times of every rank, by rank.
        traffic: Of every rank, without the numbers that ranks agree on; what sends most first.
        straggler: The rank that computes longest.
        straggler_ratio: Its computing time over the mean of the others; 1 where there are none.
        bubble: None without a pipeline, or without its actions in the trace.
    """

    steps: tuple[int, ...]
    ranks: Mapping[int, RankTimes]
    traffic: Mapping[int, tuple[Traffic, ...]]
    straggler: int
    straggler_ratio: float
    bubble: Bubble | None

    @property
    def is_slow(self) -> bool:
        """Whether the others have to wait for the straggler."""
        return self.straggler_ratio >= _SLOW

    @property
    def exposed(self) -> float:
        """The part of a step in which ranks only communicate, in the mean over ranks."""
        whole = math.fsum(times.step for times in self.ranks.values())
        return math.fsum(times.collectives for times in self.ranks.values()) / whole if whole else 0.0


def statements(report: Report) -> list[str]:
    """Return a report in sentences.

    Args:
        report: As it was measured.
    """
    told = f"rank {report.straggler} computes longest, {report.straggler_ratio:.2f} times as long as the others"
    lines = [f"straggler: {told}" if report.is_slow else f"no straggler: {told}"] if len(report.ranks) > 1 else []
    lines.append(f"exposed communication: {report.exposed:.1%} of a step")
    senders: dict[Traffic, list[int]] = defaultdict(list)
    for rank, traffic in report.traffic.items():
        for sent in traffic:
            senders[sent].append(rank)
    for sent, ranks in senders.items():
        who = "every rank" if len(ranks) == len(report.ranks) else f"rank {', '.join(map(str, ranks))}"
        lines.append(f"traffic of a step: {sent} ({who})")
    if report.bubble is not None:
        lines.append(
            f"bubble: {report.bubble.measured:.1%} measured, {report.bubble.simulated:.1%} simulated from the same "
            "actions if messages took no time"
        )
    return lines


def measure(trace: Trace) -> Report:
    """Measure a trace.

    Args:
        trace: As it was read.
    """
    found = {rank: _steps(spans) for rank, spans in trace.ranks.items()}
    numbers = sorted(set.intersection(*(set(steps) for steps in found.values())))
    numbers = numbers[1:] or numbers
    ranks = {rank: _times(trace.ranks[rank], [steps[number] for number in numbers]) for rank, steps in found.items()}
    computing = {rank: times.computing for rank, times in ranks.items()}
    straggler = max(computing, key=lambda rank: computing[rank])
    others = [value for rank, value in computing.items() if rank != straggler]
    mean = fmean(others) if others else computing[straggler]
    return Report(
        steps=tuple(numbers),
        ranks=ranks,
        traffic={rank: _traffic([steps[number] for number in numbers]) for rank, steps in found.items()},
        straggler=straggler,
        straggler_ratio=computing[straggler] / mean if mean else math.nan,
        bubble=_bubble(trace, found, numbers),
    )


def _steps(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """Return every step with all spans inside it, itself first."""
    inside: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        inside[span.parent].append(span)
    result = {}
    for span in spans:
        if span.name == "step":
            members = [span]
            for member in members:
                members += inside[member.id]
            result[int(span.attributes["step"])] = members
    return result


def _times(spans: Sequence[Span], steps: Sequence[Sequence[Span]]) -> RankTimes:
    if not steps:
        return RankTimes(step=0.0, computing=0.0, collectives=0.0, optimizer=0.0, data_wait=0.0)
    numbers = {step[0].attributes["step"] for step in steps}
    waits = [span for span in spans if span.name == "data_wait" and span.attributes.get("step") in numbers]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(steps)

    members = [span for step in steps for span in step]
    around = _around(members)
    # A collective inside of another one is part of it; one inside of a block is inside of its forward, too.
    collectives = [span for span in members if span.is_collective and not any(a.is_collective for a in around(span))]
    nested = [span for span in collectives if any(a.name in _COMPUTING for a in around(span))]
    return RankTimes(
        step=mean([step[0].duration_s for step in steps]),
        computing=mean(
            [span.duration_s for span in members if span.name in _COMPUTING] + [-span.duration_s for span in nested]
        ),
        collectives=mean([span.duration_s for span in collectives]),
        optimizer=mean([span.duration_s for span in members if span.name == "optimizer"]),
        data_wait=mean([span.duration_s for span in waits]),
    )


def _traffic(steps: Sequence[Sequence[Span]]) -> tuple[Traffic, ...]:
    counts: dict[tuple[str, str], float] = defaultdict(float)
    sizes: dict[tuple[str, str], float] = defaultdict(float)
    for members in steps:
        around = _around(members)
        for span in members:
            key = (span.name, str(span.attributes.get("axis")))
            is_inside = any(each.is_collective and each.name == span.name for each in around(span))
            if span.is_collective and "bytes" in span.attributes and not is_inside:
                counts[key] += span.attributes.get("count", 1)
                sizes[key] += span.attributes["bytes"]
    ordered = sorted(sizes, key=lambda key: (-sizes[key], key))
    num_steps = max(1, len(steps))
    return tuple(
        Traffic(op=key[0], axis=key[1], count=counts[key] / num_steps, bytes=sizes[key] / num_steps) for key in ordered
    )


def _around(members: Sequence[Span]) -> Callable[[Span], Iterator[Span]]:
    """Return what yields the spans around one, the innermost first."""
    by_id = {span.id: span for span in members}

    def around(span: Span) -> Iterator[Span]:
        while span.parent in by_id:
            span = by_id[span.parent]
            yield span

    return around


def _bubble(trace: Trace, found: Mapping[int, Mapping[int, Sequence[Span]]], numbers: Sequence[int]) -> Bubble | None:
    """Measure the pipeline that rank 0 is in; others with other data run beside it."""
    first = min(trace.ranks)
    own = {axis: index for axis, index in trace.coordinates[first].items() if axis != "pp"}
    members = [
        rank
        for rank in sorted(trace.ranks, key=lambda rank: trace.coordinates[rank].get("pp", 0))
        if {axis: index for axis, index in trace.coordinates[rank].items() if axis != "pp"} == own
    ]
    actions = [
        [[span for span in found[rank][number] if {"kind", "microbatch"} <= span.attributes.keys()] for rank in members]
        for number in numbers
    ]
    if len(members) < 2 or not actions or not all(rank for step in actions for rank in step):
        return None
    idle, whole = 0.0, 0.0
    for step in actions:
        start = min(span.start for rank in step for span in rank)
        end = max(span.end for rank in step for span in rank)
        whole += len(members) * (end - start) / 1e9
        idle += sum((end - start) / 1e9 - math.fsum(span.duration_s for span in rank) for rank in step)
    return Bubble(measured=idle / whole, simulated=_simulated(actions))


def _simulated(actions: Sequence[Sequence[Sequence[Span]]]) -> float:
    orders = [
        [
            Action(span.attributes["stage"], span.attributes["kind"], span.attributes["microbatch"])
            for span in sorted(rank, key=lambda span: span.start)
        ]
        for rank in actions[-1]
    ]
    taken: dict[str, list[float]] = defaultdict(list)
    for step in actions:
        for rank in step:
            for span in rank:
                taken[span.attributes["kind"]].append(span.duration_s)
    per_rank = len({action.stage for order in orders for action in order}) // len(orders)
    mean = {kind: fmean(values) * per_rank for kind, values in taken.items()}
    weight = mean.get("W", 0.0)
    backward = mean["B"] if "B" in mean else mean["I"] + weight
    costs = Costs(forward=mean["F"], backward=max(backward, weight), weight=weight, transfer=0.0)
    return simulate(orders, costs).bubble_share
