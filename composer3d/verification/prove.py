"""`prove`: the reference, the ranks, their comparison and its diagnosis, as one verdict."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from composer3d.mesh import Layout, Role
from composer3d.processes import temporary_folder
from composer3d.verification.causes.diagnose import UNREPEATABLE, diagnose
from composer3d.verification.evidence.drawn_steps import drawing_notes
from composer3d.verification.evidence.reached_parameters import Uneven
from composer3d.verification.evidence.untrained import notes_of_untrained
from composer3d.verification.restored_run import notes_of_restored
from composer3d.verification.session import Launch, RankReport, ReferenceReport, Session
from composer3d.verification.subject import Arithmetic, Subject
from composer3d.verification.verdict import Evidence, Verdict, gather_evidence
from composer3d.verification.verdict_failures import failures_of

__all__ = ["prove"]


def prove(
    make_subject: Callable[[], Subject],
    *,
    layout: Layout,
    launch: Launch,
    num_steps: int,
    microbatches: int,
    grad_clip: float,
    passes: tuple[Arithmetic, ...] = ("float64", "own"),
    reduced: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    tolerance: float | None = None,
) -> Verdict:
    """Compare a composition with one device, and its ranks with each other.

    Args:
        make_subject: Makes the subject in every rank; importable by name where ranks are spawned.
        layout: Axes and degrees of the composition.
        launch: Runs a function on a number of ranks, and returns their results.
        num_steps: Optimizer steps to compare.
        microbatches: Micro-batches per rank and step.
        grad_clip: Norm to which the run clips gradients.
        passes: The arithmetics to compare in.
        reduced: Reductions by the caller, for the report.
        notes: Omissions by the caller, for the report.
        tolerance: Relative, in float64; None is 1e-12.

    Memory: on every rank the model's gradients and parameters in full, twice. Collectives: on real ranks those of the
    composition in each pass, and all-gathers of its tensors.
    """
    with temporary_folder("proof") as folder:
        session = Session(
            make_subject=make_subject,
            layout=layout,
            folder=folder,
            num_steps=num_steps,
            passes=passes,
            launch=launch,
        )
        reference = session.reference()
        reference = reference if tolerance is None else _stated(reference, tolerance)
        try:
            ranks = session.composed(reference)
        except Uneven as found:
            causes = (*((UNREPEATABLE,) if reference.unrepeatable else ()), str(found))
            return Verdict(evidence=None, failures=(found.failure,), diagnosis=causes, reduced=reduced, notes=notes)
        evidence = gather_evidence(layout, reference, ranks, microbatches=microbatches, grad_clip=grad_clip)
        failures = tuple(failures_of(evidence))
        if failures:
            evidence.weights = session.weigh(_wrong_gradients(evidence))
            evidence.biases = _biases(session, evidence)
    return Verdict(
        evidence=evidence,
        failures=failures,
        diagnosis=tuple(diagnose(evidence)) if failures else (),
        reduced=reduced,
        notes=(*notes, *_notes(evidence)),
        num_steps=num_steps,
    )


def _notes(evidence: Evidence) -> list[str]:
    reference = evidence.reference
    return [
        *_mixed(reference),
        *_unwritten(reference),
        *_coarse(reference),
        *_overflowed(evidence.ranks),
        *notes_of_untrained(reference.untrained, reference.outputs),
        *drawing_notes([report.drawing for report in evidence.ranks]),
        *_coded(evidence.ranks),
        *_independent(evidence.layout),
        *_groups(evidence.layout),
        *_untraceable(evidence.ranks),
        *notes_of_restored(evidence),
    ]


def _stated(reference: ReferenceReport, tolerance: float) -> ReferenceReport:
    limits = {"float64": reference.tolerances["float64"].stated(tolerance)} if "float64" in reference.tolerances else {}
    return replace(reference, tolerances={**reference.tolerances, **limits})


def _wrong_gradients(evidence: Evidence) -> list[str]:
    return sorted(evidence.wrong("gradients", step=0)) if "float64" in evidence.reference.tolerances else []


def _biases(session: Session, evidence: Evidence) -> tuple[str, ...]:
    """Look for biases of rowwise layers that explain a wrong loss."""
    for axis in evidence.layout.names(Role.TENSOR):
        if evidence.layout.degrees[axis] > 1 and evidence.is_loss_wrong():
            found = session.explain_loss(
                evidence.first_loss(), evidence.uncut_biases(axis), evidence.layout.degrees[axis]
            )
            if found:
                return found
    return ()


def _mixed(reference: ReferenceReport) -> Iterator[str]:
    """Yield notes where the reference depends on the run's micro-batches, or where that could not be determined."""
    found = reference.mixing
    if found.unknown:
        yield (
            "whether a loss of two micro-batches together is the sum of theirs could not be asked, since they cannot "
            f"be computed together ({found.unknown}): a loss that compares samples would not be found"
        )
    if found.model:
        ways = "unless statistics are taken over all ranks (SyncBatchNorm)"
        if found.experts:
            ways = (
                f'since what the experts "{found.experts}" are given depends on the batch of a rank, as where experts '
                "choose their tokens or have a capacity, and not tokens their experts one by one"
            )
        yield (
            f"{found.module or 'the model'} relates the samples of a micro-batch: what the model computes of a sample "
            "depends on the others (two micro-batches together give other outputs than each alone, off by "
            f"{found.model:.2g}). The comparison is with one device that has the same micro-batches of every rank, as "
            "under DistributedDataParallel: another microbatch or data-parallel degree trains another model, "
            f"{ways}"
        )


def _overflowed(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield a note on steps that the loss scaler skipped before they were compared."""
    for number, step in enumerate(ranks[0].steps["own"].steps if "own" in ranks[0].steps else ()):
        if step.overflows:
            yield (
                f"step {number + 1} of the run's dtypes overflowed at its loss scale {step.overflows} "
                f"time{'s' if step.overflows > 1 else ''}, was skipped, and is compared at the scale that was left"
            )


def _unwritten(reference: ReferenceReport) -> list[str]:
    why = reference.written.unknown
    return [f"the factory could not be run as written, to be compared with what is made of it ({why})"] if why else []


def _coarse(reference: ReferenceReport) -> list[str]:
    """Return a note if the tolerance of the run's own dtypes is too wide to detect most mistakes."""
    limits = reference.tolerances["own"].by_fqn.get("gradients", {}) if "own" in reference.tolerances else {}
    middle = statistics.median(limits.values()) if limits else 0.0
    if middle <= 1.0:
        return []
    return [
        "in the run's dtypes one device's own gradients are so far from those of float64 that they bound little "
        f"({middle:.2g} of the largest element, in the median): plugins of precision are compared with themselves there"
    ]


def _coded(ranks: Sequence[RankReport]) -> list[str]:
    """Return a note where collectives change numbers on purpose, which steps were compared without."""
    codecs = {what: name for report in ranks if report.happened for what, name in report.happened.codecs.items()}
    if not codecs:
        return []
    over = {"replicas": "gradients over replicas"}
    named = ", ".join(f"{over.get(what, what)} as {name}" for what, name in sorted(codecs.items()))
    means = " Replicas were compared with each other, and what error feedback sends with what it was given."
    return [
        f"steps were compared with everything sent as it is; on the wire are {named}: every exchange by a codec was "
        "compared with the same codec on one device, element by element, and its bytes with the plan's."
        + (means if "replicas" in codecs else "")
    ]


def _independent(layout: Layout) -> list[str]:
    """Return a note where ranks train models of their own, whose exchanges no step of one device has."""
    return [
        f"along {name} ranks train models of their own: each was compared with one device on the same samples, without "
        f"what it exchanges over {name}, whose collectives were compared with the plan's"
        for name in layout.names(Role.INDEPENDENT)
        if layout.degrees[name] > 1
    ]


def _groups(layout: Layout) -> list[str]:
    """Return a note where whole groups of ranks train one model, of which one is proven."""
    return [
        f"along {name} there are {layout.degrees[name]} groups of ranks: one of them was compared with one device, on "
        f"all samples; what groups exchange over {name} is outside of this proof"
        for name in layout.names(Role.REPLICA)
        if layout.degrees[name] > 1
    ]


def _untraceable(ranks: Sequence[RankReport]) -> list[str]:
    reasons = sorted({report.untraceable for report in ranks if report.untraceable})
    uncompared = "collectives were counted, and not compared: the composition cannot be traced"
    return [f"{uncompared} ({reasons[0]})"] if reasons else []
