"""Rules for wrong weights, copies and updates after correct gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from composer3d.mesh import Role
from composer3d.verification.causes.cause_wording import SHOWN, names_of, pieces_of_ranks, some
from composer3d.verification.comparison import told_apart
from composer3d.verification.evidence.deviations import Deviation
from composer3d.verification.evidence.multiples import Multiple, common
from composer3d.verification.verdict import Evidence

__all__ = ["UPDATE_RULES", "initial", "stale"]

# Relative to the right value: a factor that is 0, or 1; a factor of many tensors that is one.
_CLOSE, _ALIKE = 1e-9, 1e-3
_ONE_FACTOR = 1e-6

Wrong = Mapping[str, Sequence[Deviation]]  # by FQN, one for each rank that has it


def initial(evidence: Evidence) -> Iterator[str]:
    """Weights that are wrong before the first step."""
    wrong = evidence.wrong("initial")
    turned = {fqn: [axis for axis, d in found[0].axes.items() if d.is_turned] for fqn, found in wrong.items()}
    turned = {fqn: axes for fqn, axes in turned.items() if axes}
    ranks = {rank for _, rank, fqn, d in evidence.deviations("initial") if fqn in wrong and not d.rel <= _CLOSE}
    if turned:
        axes = " and ".join(dict.fromkeys(axis for found in turned.values() for axis in found))
        yield f"the pieces of {some(sorted(turned))} lie in another order along {axes}: ranks hold each other's pieces"
    elif wrong and len(ranks) < len(evidence.ranks):
        shown = names_of(evidence, sorted(ranks))
        what = some(sorted(wrong))
        yield f"{shown} begins with other weights than one device, as {what}: another seed, or no broadcast"
    elif wrong:
        where = pieces_of_ranks(evidence, wrong)
        yield f"all ranks begin with other weights than one device: {some(sorted(wrong))}{where}"


def stale(evidence: Evidence) -> Iterator[str]:
    """Values that were computed from other parameters than the last step left."""
    found = evidence.stale()
    if found:
        yield (
            f"{some(found)} is stale: parameters were changed after it was computed from them, as by averaging them "
            "late; it has to be computed when they are final (PARAMETERS_FINAL), after everything that changes them"
        )


def _drifted(evidence: Evidence) -> Iterator[str]:
    """Copies that differ, where nothing that they are computed from does."""
    ties = {axis.name for axis in evidence.layout.axes if axis.role is Role.STAGE}
    kinds = {drift.what for drift in evidence.drifts}
    for what in ("gradients", "parameters", "averages"):
        groups: dict[tuple[str, ...], list[str]] = {}
        for drift in evidence.drifts:
            if drift.what == what:
                groups.setdefault(drift.axes, []).append(drift.fqn)
        for axes, fqns in groups.items():
            over = " and ".join(axes) or "several axes"
            if ties.intersection(axes):
                yield (
                    f"the copies of the tied parameter {some(fqns)} on several stages have other {what}: they are "
                    "summed or updated on one stage only"
                )
            elif what == "gradients":
                yield f"ranks along {over} have other gradients of {some(fqns)}: they are not reduced over {over}"
            elif what == "averages" and "parameters" not in kinds:
                yield f"the moving averages of {some(fqns)} differ along {over}, of equal weights"
            elif what == "parameters" and "gradients" not in kinds:
                yield (
                    f"the copies of {some(fqns)} drift apart along {over}: their ranks update them differently"
                    f"{_how_ranks_differ(evidence, fqns)}"
                )


def _buffers(evidence: Evidence) -> Iterator[str]:
    """Buffers that differ between ranks, or from one device's."""
    drifts = [drift for drift in evidence.drifts if drift.what == "buffers"]
    off = evidence.off_buffers()
    if drifts:
        over = " and ".join(dict.fromkeys(axis for drift in drifts for axis in drift.axes))
        yield f"the buffers {some([drift.fqn for drift in drifts])} are not synchronised over {over}"
    elif off and evidence.first_wrong() is None:
        yield f"the buffers {some(off)} are updated more or less often than on one device, or by another rule"


def _how_ranks_differ(evidence: Evidence, fqns: Sequence[str]) -> str:
    """Return a clause on the ranks that update parameters wrongly, and how; empty where all do alike."""
    found = [(rank, fqn, d) for _, rank, fqn, d in evidence.deviations("parameters") if fqn in fqns]
    wrong = [(rank, fqn, d) for rank, fqn, d in found if not d.rel <= _CLOSE]
    ranks = sorted({rank for rank, _, _ in wrong})
    if not ranks or len(ranks) == len(evidence.ranks):
        return _not_handed_over(evidence, fqns) if ranks else ""
    who = names_of(evidence, ranks)
    steps = [step.tensors["parameters"] for step in evidence.ranks[ranks[0]].steps["float64"].steps]
    first = next((found for found in steps if any(Multiple.UPDATE in d.multiples for d in found.values())), {})
    if first and all(fqn in first and first[fqn].is_unmoved for fqn in fqns):
        return f"; {who} leaves them as they are"
    known = [first[fqn].multiples.get(Multiple.UPDATE) for fqn in fqns if fqn in first]
    factor = common(value for value in known if value is not None)
    return (
        f"; {who} is wrong"
        if factor is None
        else f"; on {who} the updates are {told_apart(factor)} times the right ones"
    )


def _not_handed_over(evidence: Evidence, fqns: Iterable[str]) -> str:
    """Return a clause if each parameter is updated on some ranks, and not changed on the others."""
    number = evidence.first_wrong_step("parameters")
    if number is None:
        return ""
    for fqn in fqns:
        steps = [report.steps["float64"].steps[number].tensors["parameters"] for report in evidence.ranks]
        wrong = [found[fqn] for found in steps if fqn in found and not found[fqn].rel <= _CLOSE]
        if len(wrong) == len(steps) or not all(deviation.is_unmoved for deviation in wrong):
            return ""
    return "; each is updated on some ranks, and the others have it as it was: updated shards are not handed over"


def _clipping(evidence: Evidence) -> Iterator[str]:
    """Right gradients that reach the optimizer with another scale."""
    number = evidence.first_wrong_step("clipped")
    if number is None:
        return
    right = min(1.0, evidence.grad_clip / (evidence.reference.grad_norms["float64"][number] + 1e-6))
    steps = [report.steps["float64"].steps[number] for report in evidence.ranks]
    factors = [common(step.scaled.values(), rel=_ONE_FACTOR) for step in steps]
    wrong = {rank: f for rank, f in enumerate(factors) if f is None or abs(f - right) > _CLOSE * right}
    if not wrong:
        yield f"the gradients of {some(sorted(evidence.wrong('clipped', step=number)))} change before the optimizer"
        return
    shown = ", ".join(
        f"{'no single number' if factor is None else told_apart(factor, right)} on rank {rank}"
        for rank, factor in list(wrong.items())[:SHOWN]
    )
    nearest = min(
        (factor for factor in wrong.values() if factor is not None), key=lambda f: abs(f - right), default=right
    )
    yield (
        f"gradients are scaled by {shown} between backward and optimizer, where {told_apart(right, nearest)} is right: "
        f"{_why_scaled(factors, wrong)}"
    )


def _why_scaled(factors: Sequence[float | None], wrong: Mapping[int, float | None]) -> str:
    if all(factor is not None and abs(factor - 1.0) <= _CLOSE for factor in factors):
        return "they are not clipped"
    if all(factor is None for factor in factors):
        return "they are changed element by element, or one parameter otherwise than another"
    if len({factor and round(factor, 12) for factor in factors}) == 1:
        return "they are scaled after the core has clipped them"
    if len(wrong) < len(factors):
        return "they are clipped to another norm there, or scaled by some number; the other ranks do it right"
    return "every rank clips by its local norm"


def _unmoved(evidence: Evidence) -> Iterator[str]:
    """Parameters that the optimizer leaves as they are."""
    wrong = _wrong_updates(evidence)
    still = {fqn: found for fqn, found in wrong.items() if any(d.is_unmoved for d in found)}
    if still and not _not_handed_over(evidence, sorted(still)):
        where = pieces_of_ranks(evidence, still)
        yield (
            f"the optimizer skips {some(sorted(still))}: the gradients are right, and the parameters stay as they are"
            f"{where}"
        )


def _moved(evidence: Evidence) -> Iterator[str]:
    """Wrong updates of right gradients, by the first cause that explains all of them."""
    wrong = _wrong_updates(evidence)
    moved = {fqn: found for fqn, found in wrong.items() if not any(d.is_unmoved for d in found)}
    if moved:
        lines = (line for rule in _UPDATES for line in rule(evidence, moved))
        yield from (line for line in [next(lines, "")] if line)


def _wrong_updates(evidence: Evidence) -> dict[str, list[Deviation]]:
    number = evidence.first_wrong_step("parameters")
    return {} if number is None else evidence.wrong("parameters", step=number)


def _rounded(evidence: Evidence, moved: Wrong) -> Iterator[str]:
    """Parameters that have fewer digits than their dtype; where everything is in float64, casts do nothing."""
    dtypes = {deviation.narrow for found in moved.values() for deviation in found}
    if "" not in dtypes:
        widest = next(name for name in ("float32", "float16", "bfloat16") if name in dtypes)
        yield (
            f"the updated {some(sorted(moved))} have no more digits than {widest}: they are rounded after the update, "
            "and what the optimizer adds to them next time may be lost"
        )


def _scaled(evidence: Evidence, moved: Wrong) -> Iterator[str]:
    """Updates that are a multiple of the right ones."""
    factor = _factor(moved, Multiple.UPDATE)
    if factor is None or abs(factor - 1.0) <= _ALIKE:
        return
    what, where = some(sorted(moved)), pieces_of_ranks(evidence, moved)
    if abs(factor) <= _CLOSE:
        yield f"{what} are not updated, where the gradients are right{where}"
    else:
        yield (
            f"the updates of {what} are {told_apart(factor)} times the right ones, from the same gradients: the "
            f"learning rate is another one, or applied more than once{where}"
        )


def _decayed(evidence: Evidence, moved: Wrong) -> Iterator[str]:
    """Updates that are off by a multiple of the parameter."""
    factor = _factor(moved, Multiple.PARAMETER_BESIDES)
    if factor is not None:
        yield (
            f"the updates of {some(sorted(moved))} are off by {factor:.3g} times the parameters themselves: their "
            f"weight decay is that of another group, or applied more than once{pieces_of_ranks(evidence, moved)}"
        )


def _otherwise(evidence: Evidence, moved: Wrong) -> Iterator[str]:
    """Updates that nothing else explains."""
    number = evidence.first_wrong_step("parameters")
    when = f" in step {number}, after right ones" if number else ""
    state = ": its options, or what it keeps from step to step, are other ones there" if number else ""
    yield (
        f"the optimizer updates {some(sorted(moved))} otherwise than on one device{when}, from the same gradients"
        f"{pieces_of_ranks(evidence, moved)}{state}"
    )


def _factor(wrong: Wrong, relation: Multiple) -> float | None:
    """Return the one multiple that all tensors are, of those that could be asked."""
    return common(d.multiples[relation] for found in wrong.values() for d in found if relation in d.multiples)


def _averaged(evidence: Evidence) -> Iterator[str]:
    """Moving averages that are wrong, of right parameters."""
    number = evidence.first_wrong_step("averages")
    if number is None:
        return
    wrong = evidence.wrong("averages", step=number)
    found = [d.multiples.get(Multiple.WEIGHTS) for deviations in wrong.values() for d in deviations]
    share, how = common(found, least=_ALIKE), ""
    if share is not None:
        how = f": they take in {share:.4g} of the weights in step {number}, another decay"
        how = ": they are not updated" if abs(share) <= _CLOSE else how
        how = ": they are the weights" if abs(share - 1.0) <= _CLOSE else how
    where = pieces_of_ranks(evidence, wrong)
    yield f"the moving averages of {some(sorted(wrong))} are wrong in step {number}, of right weights{where}{how}"


# Of wrong updates, the first that explains all of them.
_UPDATES: tuple[Callable[[Evidence, Wrong], Iterator[str]], ...] = (_rounded, _scaled, _decayed, _otherwise)
UPDATE_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _drifted,
    _buffers,
    _clipping,
    _unmoved,
    _moved,
    _averaged,
)
