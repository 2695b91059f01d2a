"""Verdict of all passes: every difference, the worst first, and whether the composition holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from composer3d.mesh import Layout, Role
from composer3d.verification.comparison import relative
from composer3d.verification.evidence.expected_collectives import Row, compare_collectives, silent_axes
from composer3d.verification.evidence.module_outputs import Difference, Outputs, first_difference
from composer3d.verification.evidence.random_draws import StreamFault, compare_streams
from composer3d.verification.evidence.replica_drift import Drift, compare_replicas

if TYPE_CHECKING:
    from composer3d.verification.evidence.deviations import Deviation
    from composer3d.verification.evidence.microbatch_weights import Weights
    from composer3d.verification.session import RankReport, ReferenceReport

__all__ = ["Evidence", "Number", "TableRow", "Verdict", "gather_evidence"]

Kind = Literal["initial", "gradients", "clipped", "parameters", "averages"]
KINDS: tuple[Kind, ...] = ("initial", "gradients", "clipped", "parameters", "averages")


@dataclass(frozen=True, kw_only=True)
class Number:
    """A loss or norm, of the step and rank with the largest deviation."""

    reference: float
    composed: float

    @property
    def rel(self) -> float:
        """The relative distance."""
        return relative(self.composed, self.reference)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One parameter of the report.

    Args:
        fqn: Name of the parameter.
        placement: Its placements on the first rank that holds it.
        gradient: The error of its gradient in float64, of the worst step and rank.
        update: The same of the updated parameter.
    """

    fqn: str
    placement: str
    gradient: float
    update: float


@dataclass(kw_only=True, eq=False)
class Evidence:
    """Observations of all passes, for the diagnosis.

    Args:
        layout: Axes and degrees of the composition.
        reference: Report of the reference.
        ranks: Reports by rank.
        microbatches: Micro-batches per rank and step.
        grad_clip: Norm to which the run clips gradients.
        drifts: Replicas that differ.
        streams: Violated rules of the random streams.
        rows: Real and expected collectives.
        silent: Axes over which no plugin communicated.
        weights: Weights of the micro-batches in a wrong gradient.
        biases: Those that, added once a rank along a tensor axis, give the run's wrong loss.
    """

    layout: Layout
    reference: ReferenceReport
    ranks: Sequence[RankReport]
    microbatches: int
    grad_clip: float
    drifts: list[Drift] = field(default_factory=list)
    streams: list[StreamFault] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    weights: Weights | None = None
    biases: tuple[str, ...] = ()

    def stale(self) -> list[str]:
        """Return values derived from other parameters than a rank's last step left."""
        return sorted({name for report in self.ranks for steps in report.steps.values() for name in steps.stale})

    def first_wrong_output(self) -> Difference | None:
        """Return the first module whose output differs from one device's, in the order of the forward.

        Its ranks are those that differ; empty where all ranks with the module do.
        """
        groups: dict[int, dict[int, Outputs]] = {}
        for rank, report in enumerate(self.ranks):
            if report.happened is not None:
                groups.setdefault(self.layout.index(rank, Role.BATCH), {})[rank] = report.happened.outputs
        found = [first_difference(self.reference.outputs[index], ranks) for index, ranks in groups.items()]
        order = list(self.reference.outputs[0])
        differences = sorted(filter(None, found), key=lambda one: order.index(one.fqn) if one.fqn in order else 0)
        if not differences:
            return None
        first = differences[0]
        wrong = sorted(rank for one in differences if one.fqn == first.fqn for rank in one.ranks)
        having = [rank for ranks in groups.values() for rank, outputs in ranks.items() if first.fqn in outputs]
        return replace(first, ranks=tuple(wrong) if len(wrong) < len(having) else ())

    def first_loss(self) -> float:
        """Return the loss of the first step in float64, of the rank with the largest deviation."""
        right = self.reference.losses["float64"][0]
        return max((report.steps["float64"].steps[0].loss for report in self.ranks), key=lambda loss: abs(loss - right))

    def is_loss_wrong(self, step: int = 0) -> bool:
        """Return whether the forward of a step is wrong in float64; in the first, nothing was updated before."""
        if "float64" not in self.reference.tolerances:
            return False
        right, limit = self.reference.losses["float64"][step], self.reference.tolerances["float64"]["loss"]
        return any(not relative(report.steps["float64"].steps[step].loss, right) <= limit for report in self.ranks)

    def uncut_biases(self, axis: str) -> list[str]:
        """Return the biases that are replicated along a tensor axis."""
        placements: dict[str, str] = {}
        for report in self.ranks:
            placements |= report.steps["float64"].placements
        return [fqn for fqn, how in sorted(placements.items()) if fqn.endswith("bias") and f"over {axis}" not in how]

    def same_batches(self) -> tuple[int, int, int] | None:
        """Return (step, rank, rank) where two data-parallel ranks were given one batch; None where none were."""
        for report in self.ranks[0].steps.values():
            for number in range(len(report.steps)):
                seen: dict[int, tuple[int, int]] = {}
                for rank, other in enumerate(self.ranks):
                    index = self.layout.index(rank, Role.BATCH)
                    batch = next(iter(other.steps.values())).steps[number].batch
                    first = seen.setdefault(batch, (index, rank))
                    if first[0] != index:
                        return number, first[1], rank
            break
        return None

    def other_count(self) -> tuple[int, int, int] | None:
        """Return (tokens of all ranks, the step, tokens of one device) where they are not the same in the first step.

        Ranks along an independent axis have steps of their own, whose tokens are those of all together.
        """
        if self.layout.degree(Role.INDEPENDENT) > 1:
            return None
        found, right = next(iter(self.ranks[0].steps.values())).steps[0].count, sum(self.reference.counts)
        return None if found is None or found == right else (found, 0, right)

    def narrowed(self, which: str) -> dict[str, str]:
        """Return the gradients of fewer digits than one device's, with the dtype that represents them."""
        found = self.deviations("gradients", which)
        return {fqn: deviation.narrow for _, _, fqn, deviation in found if deviation.narrow and not deviation.is_faint}

    def off_buffers(self) -> list[str]:
        """Return the buffers that differ from one device's, where every rank sees all samples."""
        limits = self.reference.tolerances["float64"]
        steps = [report.steps["float64"] for report in self.ranks]
        return sorted({fqn for own in steps for fqn, rel in own.off.items() if not rel <= limits.of("buffers", fqn)})

    def deviations(self, kind: Kind, which: str = "float64") -> Iterator[tuple[int, int, str, Deviation]]:
        """Yield (step, rank, FQN, deviation) of one kind."""
        for rank, report in enumerate(self.ranks):
            if kind == "initial":
                for fqn, deviation in report.steps[which].initial.items():
                    yield 0, rank, fqn, deviation
                continue
            for number, step in enumerate(report.steps[which].steps):
                for fqn, deviation in step.tensors[kind].items():
                    yield number, rank, fqn, deviation

    def limit(self, kind: Kind, which: str, step: int, fqn: str) -> float:
        """Return the tolerance of a tensor in a step; updates of earlier steps carry rounding into later ones."""
        name = "parameters" if kind == "initial" else "later" if step and kind in ("gradients", "clipped") else kind
        limit = self.reference.tolerances[which].of(name, fqn)
        # A norm that is right within its own limit scales all of them.
        return limit + self._norm_apart(which, step) if kind == "clipped" and which == "own" else limit

    def _norm_apart(self, which: str, step: int) -> float:
        right, limits = self.reference.grad_norms[which][step], self.reference.tolerances[which]
        found = max(relative(report.steps[which].steps[step].grad_norm, right) for report in self.ranks)
        return found if found <= limits["grad_norm"] else 0.0

    def wrong(self, kind: Kind, which: str = "float64", *, step: int | None = None) -> dict[str, list[Deviation]]:
        """Return deviations beyond their tolerance, by FQN; one for each rank that has it."""
        result: dict[str, list[Deviation]] = {}
        for number, _, fqn, deviation in self.beyond(kind, which):
            if step in (None, number):
                result.setdefault(fqn, []).append(deviation)
        return result

    def beyond(self, kind: Kind, which: str) -> Iterator[tuple[int, int, str, Deviation]]:
        """Yield (step, rank, FQN, deviation) of deviations beyond their tolerance."""
        for number, rank, fqn, deviation in self.deviations(kind, which):
            if not deviation.rel <= self.limit(kind, which, number, fqn):
                yield number, rank, fqn, deviation

    def first_wrong(self) -> tuple[int, Kind] | None:
        """Return the step and kind of the first wrong quantity in float64: all later ones may follow from it."""
        for number in range(len(self.reference.losses.get("float64", ()))):
            for kind in KINDS[1:] if number else KINDS:
                if self.wrong(kind, step=number):
                    return number, kind
        return None

    def first_wrong_step(self, kind: Kind) -> int | None:
        """Return the first wrong step if what is wrong first in it is of this kind."""
        first = self.first_wrong()
        return first[0] if first is not None and first[1] == kind else None

    def number(self, name: Literal["loss", "grad_norm"], which: str) -> Number:
        """Return a loss or norm where its deviation is largest."""
        expected = self.reference.losses[which] if name == "loss" else self.reference.grad_norms[which]
        found = [
            Number(reference=reference, composed=getattr(step, name))
            for report in self.ranks
            for reference, step in zip(expected, report.steps[which].steps, strict=True)
        ]
        return max(found, key=lambda number: math.inf if math.isnan(number.rel) else number.rel)

    def largest(self, kind: Kind, which: str) -> float:
        """Return the largest deviation of one kind; NaN is larger than any number."""
        found = [math.inf if math.isnan(d.rel) else d.rel for _, _, _, d in self.deviations(kind, which)]
        return max(found, default=0.0)

    def holders(self, fqn: str) -> list[int]:
        """Return the ranks that hold a parameter."""
        which = next(iter(self.ranks[0].steps))
        return [rank for rank, report in enumerate(self.ranks) if fqn in report.steps[which].placements]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """The outcome of a verification.

    Args:
        evidence: Observations behind it; None where the ranks failed.
        failures: Failed checks, one line each; empty means verified.
        diagnosis: Likely causes, one line each.
        reduced: Quantities reduced below the manifest's, one line each.
        notes: Omitted checks, with reasons.
        num_steps: Optimizer steps that were compared.
    """

    evidence: Evidence | None
    failures: tuple[str, ...]
    diagnosis: tuple[str, ...]
    reduced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_steps: int = 0

    @property
    def ok(self) -> bool:
        """Return whether everything holds."""
        return not self.failures

    def table(self) -> list[TableRow]:
        """Return every parameter, the worst first."""
        evidence = self.evidence
        if evidence is None:
            return []
        which = next(iter(evidence.reference.tolerances))
        worst: dict[str, dict[str, float]] = {"gradients": {}, "parameters": {}}
        for kind in ("gradients", "parameters"):
            for _, _, fqn, deviation in evidence.deviations(kind, which):
                rel = math.inf if math.isnan(deviation.rel) else deviation.rel
                worst[kind][fqn] = max(worst[kind].get(fqn, 0.0), rel)
        placements: dict[str, str] = {}
        for report in reversed(evidence.ranks):
            placements |= report.steps[which].placements
        rows = [
            TableRow(
                fqn=fqn,
                placement=placements.get(fqn, ""),
                gradient=worst["gradients"].get(fqn, 0.0),
                update=worst["parameters"].get(fqn, 0.0),
            )
            for fqn in sorted({*worst["gradients"], *worst["parameters"]})
        ]
        return sorted(rows, key=lambda row: (-row.gradient, -row.update, row.fqn))


def gather_evidence(
    layout: Layout,
    reference: ReferenceReport,
    ranks: Sequence[RankReport],
    *,
    microbatches: int,
    grad_clip: float,
    has_batch_buffers: bool = True,
) -> Evidence:
    """Compare the ranks' reports with each other.

    Args:
        layout: Axes and degrees of the composition.
        reference: Report of the reference.
        ranks: Reports by rank.
        microbatches: Micro-batches per rank and step.
        grad_clip: Norm to which the run clips gradients.
        has_batch_buffers: Whether buffers must be equal on ranks that read other samples.
    """
    evidence = Evidence(layout=layout, reference=reference, ranks=ranks, microbatches=microbatches, grad_clip=grad_clip)
    for which in reference.tolerances:
        for number in range(len(reference.losses[which])):
            for what in ("gradients", "parameters", "averages"):
                found = compare_replicas(what, [r.steps[which].steps[number].held.get(what, {}) for r in ranks], layout)
                known = {(drift.what, drift.fqn) for drift in evidence.drifts}
                evidence.drifts += [drift for drift in found if (drift.what, drift.fqn) not in known]
        if has_batch_buffers:
            found = compare_replicas("buffers", [report.steps[which].buffers for report in ranks], layout)
            known = {(drift.what, drift.fqn) for drift in evidence.drifts}
            evidence.drifts += [drift for drift in found if (drift.what, drift.fqn) not in known]
    evidence.streams = compare_streams([report.draws for report in ranks], reference.draws, layout)
    happened = [report.happened for report in ranks if report.happened is not None]
    traced = [report.traced for report in ranks if report.traced is not None]
    if len(traced) == len(happened) == len(ranks):
        evidence.rows = compare_collectives(happened, traced)
    else:
        evidence.rows = compare_collectives(happened, happened)
    if len(happened) == len(ranks):
        evidence.silent = silent_axes(happened, layout)
    return evidence
