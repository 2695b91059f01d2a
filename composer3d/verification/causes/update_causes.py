"""Diagnosis rules for wrong weights and updates after correct gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from composer3d.mesh import Role
from composer3d.verification.causes.cause_wording import SHOWN, pieces_of_ranks, some
from composer3d.verification.deviations import Deviation
from composer3d.verification.verdict import Evidence

__all__ = ["UPDATE_RULES", "initial", "stale"]

_NOTHING = 1e-9  # of the right update


def initial(evidence: Evidence) -> Iterator[str]:
    """Weights that are wrong before the first step."""
    wrong = evidence.wrong("initial")
    if not wrong:
        return
    turned = {fqn: found[0].turned for fqn, found in wrong.items() if found[0].turned}
    if turned:
        axes = " and ".join(dict.fromkeys(axis for found in turned.values() for axis in found))
        yield f"the pieces of {some(sorted(turned))} lie in another order along {axes}: ranks hold each other's pieces"
    ranks = {rank for _, rank, fqn, d in evidence.deviations("initial") if fqn in wrong and not d.rel <= 1e-9}
    if not turned and len(ranks) < len(evidence.ranks):
        shown = " and ".join(evidence.layout.who(rank) for rank in sorted(ranks)[:SHOWN])
        what = some(sorted(wrong))
        yield f"{shown} begins with other weights than one device, as {what}: another seed, or no broadcast"
    elif not turned:
        where = pieces_of_ranks(evidence, wrong)
        yield f"all ranks begin with other weights than one device: {some(sorted(wrong))}{where}"


def _drifted(evidence: Evidence) -> Iterator[str]:
    ties = [axis.name for axis in evidence.layout.axes if axis.role is Role.STAGE]
    for what in ("gradients", "parameters", "averages"):
        groups: dict[tuple[str, ...], list[str]] = {}
        for drift in evidence.drifts:
            if drift.what == what:
                groups.setdefault(drift.axes, []).append(drift.fqn)
        for axes, fqns in groups.items():
            over = " and ".join(axes) or "several axes"
            if set(axes) & set(ties):
                yield (
                    f"the copies of the tied parameter {some(fqns)} on several stages have other {what}: they are "
                    "summed or updated on one stage only"
                )
            elif what == "gradients":
                yield f"ranks along {over} have other gradients of {some(fqns)}: they are not reduced over {over}"
            elif what == "averages":
                if not any(drift.what == "parameters" for drift in evidence.drifts):
                    yield f"the moving averages of {some(fqns)} differ along {over}, of equal weights"
            elif not any(drift.what == "gradients" for drift in evidence.drifts):
                yield (
                    f"the copies of {some(fqns)} drift apart along {over}: their ranks update them differently"
                    f"{_who_differs(evidence, fqns)}"
                )
    buffers = [drift for drift in evidence.drifts if drift.what == "buffers"]
    if buffers:
        over = " and ".join(dict.fromkeys(axis for drift in buffers for axis in drift.axes))
        yield f"the buffers {some([drift.fqn for drift in buffers])} are not synchronised over {over}"
    off = evidence.off_buffers()
    if off and not buffers and evidence.first_wrong() is None:
        yield f"the buffers {some(off)} are updated more or less often than on one device, or by another rule"


def _who_differs(evidence: Evidence, fqns: Sequence[str]) -> str:
    """Return a clause on the ranks that update parameters wrongly, and how; empty where all ranks do."""
    wrong = sorted({rank for _, rank, fqn, d in evidence.deviations("parameters") if fqn in fqns and not d.rel <= 1e-9})
    if not wrong or len(wrong) == len(evidence.ranks):
        return _not_handed_over(evidence, fqns) if wrong else ""
    who = " and ".join(map(evidence.layout.who, wrong[:SHOWN]))
    first = next((step for step in evidence.ranks[wrong[0]].steps["float64"].steps if step.updates), None)
    if first is None:
        return f"; {who} is wrong"
    still = [fqn for fqn in fqns if fqn in first.unmoved]
    factors = [factor for fqn in fqns if (factor := first.updates.get(fqn)) is not None]
    if len(still) == len(fqns):
        return f"; {who} leaves them as they are"
    if factors and max(factors) - min(factors) <= 1e-3 * abs(factors[0]):
        return f"; on {who} the updates are {factors[0]:.4g} times the right ones"
    return f"; {who} is wrong"


def _not_handed_over(evidence: Evidence, fqns: Sequence[str]) -> str:
    """Return a sentence if each parameter is updated on some ranks, and not changed on the others."""
    first = evidence.first_wrong()
    if first is None or first[1] != "parameters":
        return ""
    for fqn in fqns:
        steps = [report.steps["float64"].steps[first[0]] for report in evidence.ranks]
        wrong = [step for step in steps if fqn in step.parameters and not step.parameters[fqn].rel <= 1e-9]
        if len(wrong) == len(steps) or any(fqn not in step.unmoved for step in wrong):
            return ""
    return "; each is updated on some ranks, and the others have it as it was: updated shards are not handed over"


def _clipping(evidence: Evidence) -> Iterator[str]:
    """Right gradients that reach the optimizer with another scale."""
    first = evidence.first_wrong()
    if first is None or first[1] != "clipped":
        return
    number = first[0]
    right = min(1.0, evidence.grad_clip / (evidence.told.grad_norms["float64"][number] + 1e-6))
    factors = [report.steps["float64"].steps[number].clip_factor for report in evidence.ranks]
    wrong = {rank: f for rank, f in enumerate(factors) if f is None or abs(f - right) > 1e-9 * right}
    if not wrong:
        yield f"the gradients of {some(sorted(evidence.wrong('clipped', step=number)))} change before the optimizer"
        return
    shown = ", ".join(
        f"{'no single number' if factor is None else format(factor, '.4g')} on rank {rank}"
        for rank, factor in list(wrong.items())[:SHOWN]
    )
    apart = len({factor and round(factor, 12) for factor in factors}) > 1
    cause = "every rank clips by its local norm" if apart else "they are scaled after the core has clipped them"
    if apart and len(wrong) < len(factors):
        cause = "they are clipped to another norm there, or scaled by some number; the other ranks do it right"
    if all(factor is None for factor in factors):
        cause = "they are changed element by element, or one parameter otherwise than another"
    if all(factor is not None and abs(factor - 1.0) <= 1e-9 for factor in factors):
        cause = "they are not clipped"
    yield f"gradients are scaled by {shown} between backward and optimizer, where {right:.4g} is right: {cause}"


def _skipped(evidence: Evidence) -> Iterator[str]:
    first = evidence.first_wrong()
    if first is None or first[1] != "parameters":
        return
    number = first[0]
    wrong = evidence.wrong("parameters", step=number)
    unmoved = {fqn for report in evidence.ranks for fqn in report.steps["float64"].steps[number].unmoved}
    still = sorted(unmoved & wrong.keys())
    if still and not _not_handed_over(evidence, still):
        where = pieces_of_ranks(evidence, {fqn: wrong[fqn] for fqn in still})
        yield f"the optimizer skips {some(still)}: the gradients are right, and the parameters stay as they are{where}"
    moved = sorted(wrong.keys() - unmoved)
    explained = moved and [*_rounded(evidence, {fqn: wrong[fqn] for fqn in moved}), *_updates(evidence, moved, number)]
    yield from explained or ()
    if moved and not explained:
        where = pieces_of_ranks(evidence, {fqn: wrong[fqn] for fqn in moved})
        when = f" in step {number}, after right ones" if number else ""
        state = ": its options, or what it keeps from step to step, are other ones there" if number else ""
        yield (
            f"the optimizer updates {some(moved)} otherwise than on one device{when}, from the same gradients"
            f"{where}{state}"
        )


def _rounded(evidence: Evidence, moved: dict[str, list[Deviation]]) -> Iterator[str]:
    """Parameters that have fewer digits than their dtype; where everything is in float64, casts do nothing."""
    dtypes = {deviation.narrow for found in moved.values() for deviation in found}
    if "" not in dtypes:
        widest = next(name for name in ("float32", "float16", "bfloat16") if name in dtypes)
        yield (
            f"the updated {some(sorted(moved))} have no more digits than {widest}: they are rounded after the update, "
            "and what the optimizer adds to them next time may be lost"
        )


def _updates(evidence: Evidence, moved: Sequence[str], number: int) -> Iterator[str]:
    """Updates that are a multiple of the right ones, or off by a multiple of the parameter."""
    steps = [step for report in evidence.ranks for step in report.steps["float64"].steps[number : number + 1]]
    for what, name in (("updates", "updates"), ("decays", "decays")):
        found = {fqn: value for step in steps for fqn, value in getattr(step, name).items() if fqn in moved}
        known = {fqn: value for fqn, value in found.items() if value is not None}
        if not known or len(known) < len(found):
            continue
        values = list(known.values())
        middle = sum(values) / len(values)
        if max(values) - min(values) > 1e-3 * abs(middle) or (what == "updates" and abs(middle - 1.0) <= 1e-3):
            continue
        wrong = evidence.wrong("parameters", step=number)
        where = pieces_of_ranks(evidence, {fqn: wrong[fqn] for fqn in known})
        if what == "updates" and abs(middle) <= _NOTHING:
            yield f"{some(sorted(known))} are not updated, where the gradients are right{where}"
        elif what == "updates":
            yield (
                f"the updates of {some(sorted(known))} are {middle:.4g} times the right ones, from the same "
                f"gradients: the learning rate is another one, or applied more than once{where}"
            )
        else:
            yield (
                f"the updates of {some(sorted(known))} are off by {middle:.3g} times the parameters themselves: their "
                f"weight decay is that of another group, or applied more than once{where}"
            )
        return


def _averaged(evidence: Evidence) -> Iterator[str]:
    """Moving averages that are wrong, of right parameters."""
    first = evidence.first_wrong()
    if first is None or first[1] != "averages":
        return
    number = first[0]
    wrong = evidence.wrong("averages", step=number)
    steps = [report.steps["float64"].steps[number] for report in evidence.ranks]
    shares = [step.averaged_with.get(fqn) for step in steps for fqn in wrong]
    known = [share for share in shares if share is not None]
    how = ""
    if known and len(known) == len(shares) and max(known) - min(known) <= 1e-3:
        share = known[0]
        how = f": they take in {share:.4g} of the weights in step {number}, another decay"
        how = (
            ": they are not updated"
            if abs(share) <= 1e-9
            else ": they are the weights"
            if abs(share - 1) <= 1e-9
            else how
        )
    where = pieces_of_ranks(evidence, wrong)
    yield f"the moving averages of {some(sorted(wrong))} are wrong in step {number}, of right weights{where}{how}"


def stale(evidence: Evidence) -> Iterator[str]:
    """Values that were computed from other parameters than the last step left."""
    found = evidence.stale()
    if found:
        yield (
            f"{some(found)} is stale: parameters were changed after it was computed from them, as by averaging them "
            "late; it has to be computed when they are final (PARAMETERS_FINAL), after everything that changes them"
        )


UPDATE_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (_drifted, _clipping, _skipped, _averaged)
