"""Stragglers: the rank that others wait for, by the times at which ranks reached their collectives.

Without a profiler nothing measures how long a rank computes inside a forward, since it waits for other ranks in there.
But every rank's flight recorder has the time at which it reached each collective; the last rank to arrive waits for
nobody, and the others wait from their own arrival until then. A rank's spans less those waits are its own work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from composer3d.diagnostics.doctor.run_folder import Span, Witness

__all__ = ["Pace", "Straggler", "compare_paces"]

_PHASES = {
    "data_wait": "data_wait",
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "optimizer": "optimizer",
}
_RATIO = 1.5  # how much longer than the others a rank must work to be called slow
_SHARE = 0.1  # and how much of a step that must be
_OFTEN = 0.8  # and in how many of the steps: a machine that is busy delays now this rank and now that one
_FEWEST = 3  # steps


_Work: TypeAlias = Mapping[int, Mapping[str, float]]  # seconds of a rank's own work, by step and phase


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for.

    Args:
        rank: Of the world, from 0.
        phase: In which it loses most.
        own_s: Seconds a step that it works in that phase, median over the steps.
        others_s: What the other ranks need there, their median.
        waited_s: Seconds a step that the others wait, their median.
        num_steps: Steps that this is known of.
    """

    rank: int
    phase: str
    own_s: float
    others_s: float
    waited_s: float
    num_steps: int

    @property
    def ratio(self) -> float:
        """Its time of work in that phase, over that of the others."""
        return self.own_s / self.others_s if self.others_s else float("inf")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Comparison of the ranks' times.

    Args:
        num_steps: Steps that all ranks are known in, without the first, which allocates.
        straggler: The rank that works clearly longer than the others; None if there is none, or too few steps to know.
    """

    num_steps: int
    straggler: Straggler | None = None

    @property
    def known(self) -> bool:
        """Whether the steps are enough to say that no rank is slow."""
        return self.num_steps >= _FEWEST


def compare_paces(witnesses: Mapping[int, Witness]) -> Pace:
    """Return whether a rank works clearly longer than the others, and of how many steps that is known.

    Args:
        witnesses: By rank; their clocks must agree, as those of one machine do.
    """
    waits = _waits(witnesses)
    work = {rank: _work(witness.spans, waits.get(rank, ())) for rank, witness in witnesses.items()}
    if len(work) < 2 or not all(work.values()):
        return Pace(num_steps=0)
    # The first steps allocate, and each rank may have lost its own oldest ones.
    steps = sorted(set.intersection(*(set(found) for found in work.values())))[1:]
    if len(steps) < _FEWEST:
        return Pace(num_steps=len(steps))
    return Pace(num_steps=len(steps), straggler=_find_straggler(work, steps))


def _find_straggler(work: Mapping[int, _Work], steps: Sequence[int]) -> Straggler | None:
    phases = {
        rank: {phase: median(found[step].get(phase, 0.0) for step in steps) for phase in set(_PHASES.values())}
        for rank, found in work.items()
    }
    sums = {rank: sum(found.values()) for rank, found in phases.items()}
    slow = max(sums, key=lambda rank: sums[rank])
    others = [rank for rank in sums if rank != slow]
    excess = {phase: own - median(phases[rank][phase] for rank in others) for phase, own in phases[slow].items()}
    phase = max(excess, key=lambda name: excess[name])
    usual = median(sums[rank] for rank in others)
    if sums[slow] < _RATIO * usual or sums[slow] - usual < _SHARE * sums[slow]:
        return None
    spent = {rank: [sum(found[step].values()) for step in steps] for rank, found in work.items()}
    late = sum(own >= _RATIO * median(spent[rank][i] for rank in others) for i, own in enumerate(spent[slow]))
    if late < _OFTEN * len(steps):
        return None
    return Straggler(
        rank=slow,
        phase=phase,
        own_s=phases[slow][phase],
        others_s=phases[slow][phase] - excess[phase],
        waited_s=sums[slow] - usual,
        num_steps=len(steps),
    )


def _waits(witnesses: Mapping[int, Witness]) -> dict[int, list[tuple[int, int]]]:
    """Return from when to when every rank waited for the last one to come, in order of time."""
    arrivals: dict[tuple[tuple[int, ...], int], dict[int, int]] = defaultdict(dict)
    for rank, witness in witnesses.items():
        for collective in witness.account.collectives if witness.account is not None else ():
            arrivals[collective.ranks, collective.number][rank] = collective.time_ns
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (ranks, _), found in arrivals.items():
        if len(found) == len(ranks) > 1:
            last = max(found.values())
            for rank, time_ns in found.items():
                waits[rank].append((time_ns, last))
    return {rank: sorted(found) for rank, found in waits.items()}


def _work(spans: Sequence[Span], waits: Sequence[tuple[int, int]]) -> _Work:
    """Return the seconds of own work by step and phase, of the steps that began after the first known wait."""
    if not waits:
        return {}
    result: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    starts = [start for start, _ in waits]
    for span in spans:
        if span.name not in _PHASES or span.step is None or span.start_ns < starts[0]:
            continue
        waited, reached = 0, span.start_ns
        # Waits may overlap, where collectives are issued ahead.
        for start, end in waits[max(0, bisect_left(starts, span.start_ns) - 8) :]:
            if start > span.end_ns:
                break
            begin, stop = max(start, reached), min(end, span.end_ns)
            if stop > begin:
                waited, reached = waited + stop - begin, stop
        result[span.step][_PHASES[span.name]] += max(0, span.end_ns - span.start_ns - waited) / 1e9
    return result
