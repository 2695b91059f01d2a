"""Rules for wrong gradients after a correct forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from composer3d.mesh import Role
from composer3d.verification.causes.cause_wording import first_gradients, module_of, pieces_of_ranks, some
from composer3d.verification.comparison import told_apart
from composer3d.verification.evidence.deviations import AlongAxis, Deviation
from composer3d.verification.evidence.known_changes import OTHERS
from composer3d.verification.evidence.multiples import Multiple, common
from composer3d.verification.verdict import Evidence

__all__ = ["GRADIENT_RULES", "backward"]

_TINY = 1e-9
# Relative: a factor that is 1, and one that is 1 beside rounding of differences.
_ONE, _ALIKE = 1e-6, 1e-3


def _stage(evidence: Evidence) -> Iterator[str]:
    """Gradients that are missing, or zero, on everything that some stages hold."""
    wrong = first_gradients(evidence)
    gone = {fqn for fqn, found in wrong.items() if any(d.only == "reference" or d.factor == 0.0 for d in found)}
    if not gone:
        return
    for axis in evidence.layout.names(Role.STAGE):
        for index in range(evidence.layout.degrees[axis]):
            held = {
                fqn
                for fqn in wrong
                if {evidence.layout.coordinates(rank)[axis] for rank in evidence.holders(fqn)} == {index}
            }
            if held and held <= gone and evidence.layout.degrees[axis] > 1:
                yield f"the gradients of stage {axis} = {index} are missing: all {len(held)} of its own parameters"
                gone -= held
    if gone:
        yield f"no gradient reaches {some(sorted(gone))}"


def _leftover(evidence: Evidence) -> Iterator[str]:
    """Gradients of a later step that still hold those of the step before."""
    number = evidence.first_wrong_step("gradients")
    if not number:
        return
    wrong = first_gradients(evidence)
    known = [d.multiples for found in wrong.values() for d in found if Multiple.EARLIER in d.multiples]
    late = {fqn for fqn, found in wrong.items() if any(_is_one(d.multiples.get(Multiple.EARLIER)) for d in found)}
    times = common(multiples[Multiple.EARLIER_BESIDES] for multiples in known)
    if late and late == wrong.keys():
        yield f"the gradients of {some(sorted(late))} in step {number} are those of step {number - 1}: used a step late"
    elif times is not None:
        shown = "" if abs(times - 1.0) <= _ALIKE else f"{told_apart(times)} times "
        yield (
            f"the gradients of step {number} hold {shown}those of step {number - 1} besides: they are not zeroed, or "
            "kept and added again"
        )


def _is_one(factor: float | None) -> bool:
    return factor is not None and abs(factor - 1.0) <= _ONE


def _elements(evidence: Evidence) -> Iterator[str]:
    """Gradients whose right elements were changed elementwise, or that are those of another parameter."""
    groups: dict[str, list[str]] = {}
    for fqn, found in first_gradients(evidence).items():
        kinds = {d.change for d in found}
        if len(kinds) == 1:
            groups.setdefault(kinds.pop(), []).append(fqn)
    # Beside a residual connection right gradients are equal, and some wrong ones are those of another parameter.
    is_everything = not groups.pop("", None)
    for what, fqns in groups.items():
        if is_everything or not what.startswith(OTHERS):
            where = pieces_of_ranks(evidence, {fqn: first_gradients(evidence)[fqn] for fqn in fqns})
            yield f"the gradients of {some(sorted(fqns))} are {what}{where}"


def _extra(evidence: Evidence) -> Iterator[str]:
    """Gradients that one device does not have."""
    there = {fqn for report in evidence.ranks for fqn in report.steps["float64"].initial}
    wrong = first_gradients(evidence)
    extra = sorted(fqn for fqn, found in wrong.items() if any(d.only == "run" for d in found))
    if extra:
        yield (
            f"{some(extra)} has a gradient, and none on one device: it is frozen there, or nothing uses it, and "
            "something trains it here"
        )
    late = sorted(wrong.keys() - there)
    if late:
        yield (
            f"{some(late)} is made in the first forward: plugins cut, replicate and reduce the parameters that are "
            "there before, and an optimizer is made with those; make it when the model is made"
        )


def _narrow(evidence: Evidence) -> Iterator[str]:
    """Gradients that have fewer digits than their dtype; where everything is in float64, casts do nothing."""
    for which in evidence.reference.tolerances:
        narrow, wrong = evidence.narrowed(which), evidence.wrong("gradients", which, step=0)
        # Where only some are, each micro-batch was rounded separately, and their sum has more digits.
        if narrow and 2 * len(wrong.keys() & narrow) >= len(wrong):
            widest = next(name for name in ("float32", "float16", "bfloat16") if name in narrow.values())
            yield (
                f"the gradients of {some(sorted(narrow))} have no more digits than {widest}: they are rounded on the "
                "way, by a cast before or after their reduction"
            )
            return


def _partial(evidence: Evidence) -> Iterator[str]:
    """Gradients that are right, in all or in some elements, once they are summed over tp."""
    wrong = first_gradients(evidence)
    for axis in evidence.layout.names(Role.TENSOR):
        whole = [fqn for fqn, found in wrong.items() if _all(found, axis, "summed")]
        mixed = [fqn for fqn, found in wrong.items() if fqn not in whole and _all(found, axis, "mixed")]
        if whole:
            modules = list(dict.fromkeys(map(module_of, whole)))
            yield (
                f"the gradients of {some(whole)} are partial over {axis}: added up over its ranks they are right, so "
                f"a reduction over {axis} is missing in the backward of {some(modules)}"
            )
        if mixed:
            yield (
                f"a part of the gradients of {some(mixed)} is partial over {axis}: the gradient that comes back to "
                f"{module_of(mixed[-1])} is not reduced over {axis} where a cut tensor is joined to a whole one"
            )


def _all(found: Sequence[Deviation], axis: str, how: str) -> bool:
    return all(getattr(deviation.axes.get(axis, AlongAxis()), how) <= _TINY for deviation in found)


def _zero_bubble(evidence: Evidence) -> Iterator[str]:
    """A schedule that reads parameters after they were freed."""
    if not first_gradients(evidence) or not any(report.keep_unsharded for report in evidence.ranks):
        return
    for axis in evidence.layout.names(Role.BATCH):
        gathers = sum(row.count for row in evidence.rows if row.axis == axis and row.op == "all_gather")
        scatters = sum(row.count for row in evidence.rows if row.axis == axis and row.op == "reduce_scatter")
        if gathers > scatters > 0:
            yield (
                "the schedule needs parameters unsharded from the first forward to the last backward (zero bubble), "
                f"and they are freed in between: {gathers} all-gathers over {axis} beside {scatters} reduce-scatters"
            )


def _not_finite(evidence: Evidence) -> Iterator[str]:
    """Gradients that are not finite."""
    wrong = {fqn: d for fqn, d in first_gradients(evidence).items() if any(math.isnan(one.rel) for one in d)}
    if wrong:
        yield f"the gradients of {some(sorted(wrong))} are not finite{pieces_of_ranks(evidence, wrong)}"


GRADIENT_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _elements,
    _extra,
    _stage,
    _leftover,
    _narrow,
    _not_finite,
    _partial,
    _zero_bubble,
)


def backward(evidence: Evidence, *, is_explained: bool) -> Iterator[str]:
    """Yield where wrong gradients begin, seen from the loss, where the loss is right.

    Args:
        evidence: Observations of all passes.
        is_explained: Whether there is a cause already; then only sentences that narrow it down are yielded.
    """
    step, wrong = evidence.first_wrong_step("gradients"), first_gradients(evidence)
    if step is None:
        return
    if evidence.is_loss_wrong(step):
        if step:
            yield (
                f"the loss of step {step} is another one, with right updates before it: its forward computes from "
                "other parameters than the step before left, as from a stale gather or a cache"
            )
        return
    when = f" of step {step}" if step else ""
    total = {fqn for number, _, fqn, _ in evidence.deviations("gradients") if number == step}
    right = total - wrong.keys()
    where = pieces_of_ranks(evidence, wrong)
    if not right and not (is_explained and not where):
        yield (
            f"the loss{when} is right, and no gradient is{where}: what comes after the backward changes them, or the "
            "backward of the loss itself"
        )
    if not right:
        return
    order = _in_order(evidence, total)
    last = max(order[fqn] for fqn in wrong)
    if any(order[fqn] < last for fqn in right) or not any(order[fqn] > last for fqn in right):
        yield f"the loss{when} is right, and of all gradients those of {some(sorted(wrong))} alone are wrong{where}"
        return
    following = min((fqn for fqn in right if order[fqn] > last), key=lambda fqn: (order[fqn], fqn))
    here = sorted(fqn for fqn in wrong if order[fqn] == last)
    yield (
        f"the loss{when} is right, and so are all gradients down to {module_of(following)}: the backward goes wrong "
        f"between it and {module_of(here[0])}, whose {some([fqn.rpartition('.')[2] for fqn in here])} and everything "
        f"before it have wrong ones{where}"
    )


def _in_order(evidence: Evidence, fqns: set[str]) -> Mapping[str, int]:
    """Return the position in the forward of each parameter's module; unknown ones come last."""
    places = {fqn: place for place, fqn in enumerate(evidence.reference.outputs[0])}

    def place(fqn: str) -> int:
        while fqn:
            fqn = fqn.rpartition(".")[0]
            if fqn in places:
                return places[fqn]
        return len(places)

    return {fqn: place(fqn) for fqn in fqns}
