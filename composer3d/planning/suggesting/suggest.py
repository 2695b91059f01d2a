"""From a search to a few manifests worth trying: different, accepted by `check`, fitting by `plan`, with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer3d.errors import ComposerError
from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.search import (
    Candidate,
    Choices,
    Costs,
    Found,
    Keep,
    divisors,
    evaluate,
    search,
    sequence_degrees,
)

__all__ = ["Planned", "Suggestion", "against", "bases", "different", "suggest"]

GIB = 2**30
NUM_SUGGESTIONS, NUM_PLANNED = 5, 12
_EXPERT_DEGREES = 4  # that are planned at most


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Memory of a layout's fullest rank and the time of its step, as `plan` states them.

    Args:
        peak: Allocated.
        total: What a device must have.
        time: As in `plan --json`.
    """

    peak: int
    total: int
    time: Mapping[str, Any]

    def of(self, setup: Setup) -> Candidate:
        """Return the layout with these costs."""
        return Candidate(
            setup=setup,
            peak_bytes=self.peak,
            reserved_bytes=float(self.total),
            step_s=self.time["step_s"]["value"],
            time=self.time,
            is_planned=True,
        )


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One layout worth trying.

    Args:
        candidate: It, with memory and time.
        reasons: Why it wins, with numbers.
    """

    candidate: Candidate
    reasons: tuple[str, ...]


def suggest(
    costs: Costs,
    own: Setup,
    hardware: Hardware,
    *,
    world_size: int,
    memory_bytes: float,
    keep: Keep,
    plan: Callable[[Setup], Planned],
    given: Planned | None = None,
    choices: Choices | None = None,
) -> tuple[tuple[Suggestion, ...], Found, tuple[str, ...]]:
    """Return the best layouts that `check` accepts and that fit by the plan, what was searched, and what was refused.

    The costs of the search are quick, and may be off for a kind of layout. So every layout is planned before it is
    proposed; where one does not fit, the kind's costs are corrected by the plan, and the search is repeated.

    Args:
        costs: Of the model's layouts.
        own: The given manifest in numbers.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device.
        keep: What the user pins.
        plan: Checks and plans one layout; raises ComposerError where it cannot be.
        given: The given manifest's own costs; None where it cannot run.
        choices: What installed plugins can make.
    """
    trials = _Trials(costs=costs, hardware=hardware, memory_bytes=memory_bytes, plan=plan)
    while True:
        tried: list[Found] = []
        for cp in sequence_degrees(own, world_size, choices or Choices()):
            tried += [
                search(
                    costs,
                    replace(base, cp=cp),
                    hardware,
                    world_size=world_size,
                    memory_bytes=memory_bytes,
                    keep=keep,
                    choices=choices,
                    correction=trials.correction,
                )
                for base in bases(own, hardware)
            ]
            if any(one.num_fitting for one in tried):
                break
        found = _together(tried)
        if not trials.hear(different(found.best, trials.chosen)):
            break
    trials.finish(own, keep, choices or Choices())
    mine = None if given is None else given.of(own)
    found_all = tuple(
        Suggestion(candidate=candidate, reasons=tuple(against(candidate, mine, memory_bytes)))
        for candidate in trials.chosen
    )
    return found_all, found, tuple(trials.refused)


def _together(searched: Sequence[Found]) -> Found:
    return Found(
        best=tuple(candidate for one in searched for candidate in one.best),
        num_tried=sum(one.num_tried for one in searched),
        num_fitting=sum(one.num_fitting for one in searched),
        smallest=min((one.smallest for one in searched if one.smallest), key=lambda c: c.peak_bytes, default=None),
    )


@dataclass(kw_only=True)
class _Trials:
    """Answers of `check` and `plan` so far.

    Args:
        costs: Of the model's layouts.
        hardware: The cluster.
        memory_bytes: Of a device.
        plan: Checks and plans one layout.
    """

    costs: Costs
    hardware: Hardware
    memory_bytes: float
    plan: Callable[[Setup], Planned]
    chosen: list[Candidate] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _asked: list[Setup] = field(default_factory=list)
    _corrections: dict[tuple[object, ...], float] = field(default_factory=dict)

    def correction(self, setup: Setup) -> float:
        """Return by what the searched memory of such layouts is multiplied."""
        return self._corrections.get(_kind(setup), 1.0)

    def hear(self, candidates: Iterable[Candidate]) -> bool:
        """Plan the best of some layouts; return whether the search has to be repeated."""
        for candidate in candidates:
            if len(self.chosen) == NUM_SUGGESTIONS - 1 or len(self._asked) >= NUM_PLANNED:
                return False
            if candidate.setup not in self._asked and self.ask(candidate):
                return True
        return False

    def ask(self, candidate: Candidate) -> bool:
        """Check and plan a layout; return whether it does not fit by the plan."""
        setup = candidate.setup
        self._asked.append(setup)
        try:
            planned = self.plan(setup)
        except ComposerError as error:
            self.refused.append(str(error))
            return False
        searched = evaluate(self.costs, setup, self.hardware).reserved_bytes
        self._corrections[_kind(setup)] = max(self.correction(setup), planned.total / searched)
        found = planned.of(setup)
        if found.verdict(self.memory_bytes) == "does not fit":
            needs, has = planned.total / GIB, self.memory_bytes / GIB
            self.refused.append(
                f"needs {needs:.1f} of {has:.1f} GiB by the plan, and {searched / GIB:.1f} by the search's costs"
            )
            return True
        self.chosen.append(found)
        return False

    def finish(self, own: Setup, keep: Keep, choices: Choices) -> None:
        """Plan what the search does not tell apart, and order what was chosen."""
        if choices.ep:
            self.ask_experts(keep)
        self.ask_float8(keep)
        # Lower precision is another run: it comes after all that compute what was asked for.
        self.chosen.sort(key=lambda one: (one.setup.precision.dtype != own.precision.dtype, one.step_s))

    def ask_experts(self, keep: Keep) -> None:
        """Plan the fastest of the chosen with its experts over more ranks, from the least on until that is slower.

        The search does not tell such layouts apart; a model without experts is refused once, which is no news.
        """
        best = min(self.chosen, key=lambda candidate: candidate.step_s, default=None)
        if best is None:
            return
        setup = best.setup
        degrees = [degree for degree in divisors(setup.dp_shard * setup.cp) if degree > setup.ep]
        wanted = [other for degree in degrees if keep(other := replace(setup, ep=degree))]
        for other in wanted[:_EXPERT_DEGREES]:
            try:
                found = self.plan(other).of(other)
            except ComposerError:
                return
            if found.verdict(self.memory_bytes) == "does not fit" or found.step_s >= best.step_s:
                return
            self.chosen = [found, *(one for one in self.chosen if one.setup.ep == setup.ep)]
            best = found

    def ask_float8(self, keep: Keep) -> None:
        """Ask for the fastest of the chosen with products in float8, where the device has them and they are faster."""
        if not self.chosen or "float8" not in self.hardware.device.peaks:
            return
        best = min(self.chosen, key=lambda candidate: candidate.step_s)
        setup = replace(best.setup, precision=replace(best.setup.precision, dtype="float8_e4m3fn"))
        if best.setup.precision.dtype != "bfloat16" or not keep(setup):
            return
        # Casts may take longer than the products gain; a plan costs far more than the two traces that tell.
        if not self.costs.can(setup) or self._searched_s(setup) < self._searched_s(best.setup):
            self.ask(replace(best, setup=setup))
        self.chosen = [one for one in self.chosen if one.setup != setup or one.step_s < best.step_s]

    def _searched_s(self, setup: Setup) -> float:
        return evaluate(self.costs, setup, self.hardware).step_s


def _kind(setup: Setup) -> tuple[object, ...]:
    """Return what layouts have in common whose memory is misjudged alike."""
    return setup.recompute, setup.pp > 1, setup.stages_per_rank > 1


def bases(own: Setup, hardware: Hardware) -> tuple[Setup, ...]:
    """Return the precisions to search: the manifest's, and bfloat16 compute on weights that stay in float32."""
    if own.precision.dtype == "float32" and "bfloat16" in hardware.device.peaks:
        return own, replace(own, precision=Precision())
    return (own,)


def different(candidates: Sequence[Candidate], chosen: Sequence[Candidate]) -> Iterable[Candidate]:
    """Yield candidates by step time that differ from those chosen so far in degrees or precision; then by anything."""
    ordered = sorted(candidates, key=lambda candidate: candidate.step_s)
    left = []
    for candidate in ordered:
        if any(_key(candidate) == _key(other) for other in chosen):
            left.append(candidate)
        else:
            yield candidate
    for candidate in left:
        if all(candidate.setup != other.setup for other in chosen):
            yield candidate


def _key(candidate: Candidate) -> tuple[object, ...]:
    setup = candidate.setup
    return setup.tp, setup.pp, setup.precision.dtype


def against(candidate: Candidate, own: Candidate | None, memory_bytes: float) -> Iterable[str]:
    """Yield why a layout wins: its own figures, and what moved against the given manifest's."""
    part = candidate.reserved_bytes / memory_bytes
    yield f"{candidate.reserved_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB ({part:.0%}), by the plan"
    if own is None:
        return
    if own.verdict(memory_bytes) == "does not fit":
        yield f"the given manifest needs {own.reserved_bytes / GIB:.1f} GiB and does not fit"
        return
    yield f"{own.step_s / candidate.step_s:.2f} x the speed of the given manifest"
    if candidate.time is None or own.time is None:
        return
    named = {"compute_s": "compute", "exposed_s": "exposed communication", "bubble_s": "waiting in the pipeline"}
    rows = [(name, candidate.time[key]["value"], own.time[key]["value"]) for key, name in named.items()]
    for name, new, old in sorted(rows, key=lambda row: row[1] - row[2]):
        if abs(new - old) > 0.01 * own.step_s:
            yield f"{name} {old:.3g} s -> {new:.3g} s"
