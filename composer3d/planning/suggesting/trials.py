"""Layouts that a search found, tried: checked, planned, and those that only a plan tells apart asked for besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer3d.errors import ComposerError
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.search import Candidate, Choices, Costs, Found, Keep, divisors, evaluate

__all__ = ["GIB", "NUM_PLANNED", "Planned", "Trials", "differences"]

GIB = 2**30
NUM_SUGGESTIONS, NUM_PLANNED = 5, 12
_EXPERT_DEGREES = 4  # that are planned at most
_CORRECTED = 3  # times at most that a degree of cp is searched, where what was found does not fit by the plan
_WAITING = 0.05  # part of a step that waits for collectives, below which sending less is not worth a plan


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


@dataclass(kw_only=True)
class Trials:
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

    def ask_microbatches(self, keep: Keep) -> None:
        """Plan the fastest in every dtype with larger micro-batches, as long as they are faster and fit.

        The search takes the time of a micro-batch for that of its samples; products of more rows reach more of a peak.
        """
        for dtype in dict.fromkeys(candidate.setup.precision.dtype for candidate in self.chosen):
            best = min((one for one in self.chosen if one.setup.precision.dtype == dtype), key=lambda one: one.step_s)
            setup = best.setup
            share = setup.global_batch // setup.data_parallel
            sizes = [size for size in divisors(share) if size > setup.microbatch and size * setup.pp <= share]
            for larger in filter(keep, (replace(setup, microbatch=size) for size in sizes)):
                sized = evaluate(self.costs, larger, self.hardware)
                reserved = sized.reserved_bytes * self.correction(larger)
                if replace(sized, reserved_bytes=reserved).verdict(self.memory_bytes) != "fits":
                    break
                num_chosen = len(self.chosen)
                if larger in self._asked or self.ask(sized) or len(self.chosen) == num_chosen:
                    break
                slower = max(best, self.chosen[-1], key=lambda one: one.step_s)
                self.chosen.remove(slower)
                if slower is not best:
                    break
                best = self.chosen[-1]

    def ask_sequences(self, keep: Keep, degrees: Sequence[int], searched: Callable[[Setup, Keep], Found]) -> None:
        """Plan the fastest of the chosen with a sequence over more ranks, as long as that is faster by the search.

        Every tensor-parallel degree of such layouts has to be traced: that of the fastest, and the next smaller one.

        Args:
            keep: What the user pins.
            degrees: Of cp, from the least on.
            searched: Finds the layouts of a precision and a degree of cp that are kept.
        """
        best = self._fastest
        if best is None:
            return
        tp, least = best.setup.tp, self._searched_s(best.setup)
        near = {tp, *divisors(tp)[-2:]}
        for cp in degrees:
            if cp <= best.setup.cp:
                continue
            for _ in range(_CORRECTED):
                found = searched(replace(best.setup, cp=cp), lambda setup: setup.tp in near and keep(setup)).best
                if not found or found[0].step_s >= least:
                    return
                if not self.ask(found[0]):
                    least = found[0].step_s
                    break

    def ask_experts(self, keep: Keep, choices: Choices) -> None:
        """Plan the fastest of the chosen with its experts over more ranks, from the least on until that is slower.

        The search does not tell such layouts apart; a model without experts is refused once, which is no news.
        """
        best = self._fastest
        if best is None or not choices.ep:
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

    def ask_other_runs(self, keep: Keep, choices: Choices) -> None:
        """Ask for the fastest with products in float8, and with what data parallelism sends compressed.

        Both compute something else than was asked for, so neither stays where it is not faster.
        """
        best = self._fastest
        if best is None:
            return
        for setup in (*self._float8(best), *self._compressed(best, choices)):
            if keep(setup) and not self.ask(replace(best, setup=setup)):
                self.chosen = [one for one in self.chosen if one.setup != setup or one.step_s < best.step_s]

    def proposed(self, own: Setup) -> list[Candidate]:
        """Return what to propose, the fastest first: of those that compute what was asked for, then of other runs.

        Of layouts that differ in their micro-batches alone the fastest is proposed, and the fastest with room left.
        """
        fastest: dict[tuple[Setup, str], Candidate] = {}
        for one in self._ordered:
            fastest.setdefault((replace(one.setup, microbatch=1), one.verdict(self.memory_bytes)), one)
        ordered = list(fastest.values())
        others = [one for one in ordered if differences(one.setup, own)]
        as_asked = [one for one in ordered if one not in others]
        return [*as_asked[: max(1, NUM_SUGGESTIONS - len(others))], *others][:NUM_SUGGESTIONS]

    @property
    def _ordered(self) -> list[Candidate]:
        return sorted(self.chosen, key=lambda candidate: candidate.step_s)

    @property
    def _fastest(self) -> Candidate | None:
        return next(iter(self._ordered), None)

    def _float8(self, best: Candidate) -> Iterator[Setup]:
        """Yield a layout with products in float8, where the device has them and they are faster by the search."""
        setup = replace(best.setup, precision=replace(best.setup.precision, dtype="float8_e4m3fn"))
        if best.setup.precision.dtype != "bfloat16" or "float8" not in self.hardware.device.peaks:
            return
        # Casts may take longer than the products gain; a plan costs far more than the two traces that tell.
        if not self.costs.can(setup) or self._searched_s(setup) < self._searched_s(best.setup):
            yield setup

    def _compressed(self, best: Candidate, choices: Choices) -> Iterator[Setup]:
        """Yield a layout that sends less, where it sends anything and waits for it."""
        setup, time = best.setup, best.time
        assert time is not None, "planned"
        waits = time["exposed_s"]["value"] >= _WAITING * best.step_s
        if not waits or setup.compression != "none" or setup.data_parallel == 1:
            return
        # Gathered weights are what stage 3 sends most of.
        for name in ("both", "gradients") if setup.zero == 3 else ("gradients",):
            if name in choices.compression:
                yield replace(setup, compression=name)
                return

    def _searched_s(self, setup: Setup) -> float:
        return evaluate(self.costs, setup, self.hardware).step_s


def _kind(setup: Setup) -> tuple[object, ...]:
    """Return what layouts have in common whose memory is misjudged alike."""
    return setup.recompute, setup.pp > 1, setup.stages_per_rank > 1


def differences(setup: Setup, own: Setup) -> list[str]:
    """Return in what a layout computes something else than was asked for: it is another run."""
    found = []
    if setup.precision.dtype != own.precision.dtype:
        found.append(f"computes in {setup.precision.dtype}")
    if setup.compression != own.compression:
        sent = "gradients and weights" if setup.compression == "both" else setup.compression
        found.append(f"sends {sent} compressed")
    return found
