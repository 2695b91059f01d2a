"""Failed checks of the evidence, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from composer3d.verification.causes.rounding_causes import multiplied
from composer3d.verification.comparison import told_apart
from composer3d.verification.evidence.drawn_steps import drawing_failures
from composer3d.verification.restored_run import failures_of_restored
from composer3d.verification.verdict import KINDS, Evidence, Kind

if TYPE_CHECKING:
    from composer3d.verification.session import ReferenceReport

__all__ = ["failures_by_heading", "failures_of"]


def failures_by_heading(evidence: Evidence) -> Mapping[str, tuple[str, ...]]:
    """Return the failed checks as `numerics`, `collectives` and `state`: the headings of a plugin's tests."""
    by_heading = {"collectives": tuple(_of_collectives(evidence)), "state": tuple(failures_of_restored(evidence))}
    others = set(by_heading["collectives"] + by_heading["state"])
    return {"numerics": tuple(line for line in failures_of(evidence) if line not in others), **by_heading}


def failures_of(evidence: Evidence) -> Iterator[str]:
    """Yield a line for everything that does not hold."""
    yield from _of_one_device(evidence.reference)
    yield from _apart_from_written(evidence)
    counted = evidence.other_count()
    if counted is not None:
        yield "the ranks count {} valid tokens in step {}, and one device {}".format(*counted)
    for which, limits in evidence.reference.tolerances.items():
        label = "in float64" if which == "float64" else "in the run's dtypes"
        for name, what in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
            number = evidence.number(name, which)  # type: ignore[arg-type]
            if not number.rel <= limits[name]:
                rel, limit = number.rel, limits[name]
                shown, allowed = told_apart(rel, limit, digits=3), told_apart(limit, rel, digits=3)
                yield f"{what} differs by {shown} of its value, more than {allowed} ({label})"
        for kind in KINDS:
            wrong = evidence.wrong(kind, which)
            if wrong:
                exceeded = min(
                    evidence.limit(kind, which, step, fqn) for step, _, fqn, _ in evidence.beyond(kind, which)
                )
                total = len({fqn for _, _, fqn, _ in evidence.deviations(kind, which)})
                yield f"{len(wrong)} of {total} {_WHAT[kind]} differ by more than {exceeded:.3g} ({label})"
        narrow = evidence.narrowed(which)
        if narrow:
            yield f"{len(narrow)} gradients have fewer digits than those of one device, as {min(narrow)} ({label})"
    yield from multiplied(evidence)
    for what in ("gradients", "parameters", "averages", "buffers"):
        drifted = [drift for drift in evidence.drifts if drift.what == what]
        if drifted:
            yield f"copies of {len(drifted)} {what} are not equal on the ranks that hold them, as {drifted[0].fqn}"
    off = evidence.off_buffers()
    if off:
        yield f"{len(off)} buffers are not those of one device, as {off[0]}"
    yield from failures_of_restored(evidence)
    stale = evidence.stale()
    if stale:
        yield f"{len(stale)} values that plugins keep beside parameters are not those of the parameters, as {stale[0]}"
    same = evidence.same_batches()
    if same is not None:
        yield f"the data-parallel ranks of rank {same[1]} and rank {same[2]} are given the same batch in step {same[0]}"
    if evidence.streams:
        sites = {fault.site for fault in evidence.streams}
        yield f"random numbers are not drawn as the axes promise at {len(sites)} call sites, as {min(sites)}"
    else:
        yield from drawing_failures([report.drawing for report in evidence.ranks])
    yield from _of_collectives(evidence)


def _of_collectives(evidence: Evidence) -> Iterator[str]:
    for rank, report in enumerate(evidence.ranks):
        if report.trace_error:
            yield f"rank {rank} cannot be traced, so its collectives cannot be compared: {report.trace_error}"
            break
    for row in evidence.rows:
        if not row.ok:
            where = f"rank {row.rank}" + (", bytes of all ranks together" if row.is_summed else "")
            yield (
                f"{row.op} over {row.axis}: {row.count} of {row.bytes} bytes happened on {where}, "
                f"{row.expected} of {row.expected_bytes} bytes were expected"
            )
    yield from _coded(evidence)
    for axis in evidence.silent:
        yield f"{axis} = {evidence.layout.degrees[axis]}, and no plugin communicated over {axis}"


def _coded(evidence: Evidence) -> Iterator[str]:
    for rank, report in enumerate(evidence.ranks):
        if report.happened is not None and report.happened.wrong_codecs:
            yield f"on rank {rank} {report.happened.wrong_codecs[0]}"
            return


def _of_one_device(reference: ReferenceReport) -> Iterator[str]:
    if reference.unrepeatable:
        yield f"one device computes another first step when it is run again, off by {reference.unrepeatable:.3g}"
    if reference.mixing.loss:
        yield f"the loss of two micro-batches together is not the sum of theirs, off by {reference.mixing.loss:.3g}"


def _apart_from_written(evidence: Evidence) -> Iterator[str]:
    written = evidence.reference.written
    if written.loss:
        yield f"one device has another loss with the factory as written, off by {written.loss:.3g} (in float64)"
    if written.gradients:
        fqn, distance = written.gradients[0]
        yield (
            f"{len(written.gradients)} gradients of one device are not those of the factory as written, as that of "
            f"{fqn}, off by {distance:.3g} (in float64)"
        )


_WHAT: Mapping[Kind, str] = {
    "initial": "weights before the first step",
    "gradients": "gradients",
    "clipped": "gradients as the optimizer sees them",
    "parameters": "updated parameters",
    "averages": "moving averages",
}
