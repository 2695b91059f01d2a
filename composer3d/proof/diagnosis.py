"""What known mistakes look like: each rule reads the evidence and says what is likely wrong, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from composer3d.mesh import Role
from composer3d.proof.composed import Deviation
from composer3d.proof.shares import explain_shares
from composer3d.proof.verdict import Evidence

__all__ = ["diagnose"]

_TINY = 1e-9
_SHOWN = 4


def diagnose(evidence: Evidence) -> list[str]:
    """Return the likely causes, each once, the most telling first."""
    lines = [line for rule in _RULES for line in rule(evidence)]
    return list(dict.fromkeys(lines))


def _some(fqns: Sequence[str]) -> str:
    more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
    return ", ".join(fqns[:_SHOWN]) + more


def _module(fqn: str) -> str:
    return fqn.rpartition(".")[0] or "the root"


def _silent(evidence: Evidence) -> Iterator[str]:
    for axis in evidence.silent:
        yield (
            f"the owner of {axis} did nothing: every rank along {axis} computes the same, and none of them "
            "communicates; a pattern of its plugin may match nothing"
        )


def _shares(evidence: Evidence) -> Iterator[str]:
    yield from explain_shares(evidence)


def _stage(evidence: Evidence) -> Iterator[str]:
    """Gradients that are missing, or zero, on everything that some stages hold."""
    wrong = _first(evidence)
    gone = {fqn for fqn, found in wrong.items() if any(d.missing or d.factor == 0.0 for d in found)}
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
        yield f"no gradient reaches {_some(sorted(gone))}"


def _leftover(evidence: Evidence) -> Iterator[str]:
    """Gradients of a later step that still hold those of the step before."""
    number = evidence.first_wrong_step()
    if not number:
        return
    found = [value for r in evidence.ranks for value in r.steps["float64"].steps[number].leftovers.values()]
    known = [value for value in found if value is not None]
    if known and len(known) == len(found) and max(known) - min(known) <= 1e-3 * abs(known[0]):
        times = "" if abs(known[0] - 1.0) <= 1e-3 else f"{known[0]:.4g} times "
        yield (
            f"the gradients of step {number} hold {times}those of step {number - 1} besides: they are not zeroed, or "
            "kept and added again"
        )


def _narrow(evidence: Evidence) -> Iterator[str]:
    """Gradients that have fewer digits than their dtype; where everything is in float64, casts do nothing."""
    wrong = _first(evidence)
    if not wrong and "own" in evidence.told.tolerances:
        wrong = evidence.wrong("gradients", "own", step=0)
    found = {fqn: {d.narrow for d in deviations} for fqn, deviations in wrong.items()}
    narrow = {fqn: kinds for fqn, kinds in found.items() if "" not in kinds}
    dtypes = {kind for kinds in narrow.values() for kind in kinds}
    if narrow and len(narrow) == len(found):
        widest = next(name for name in ("float32", "float16", "bfloat16") if name in dtypes)
        yield (
            f"the gradients of {_some(sorted(narrow))} have no more digits than {widest}: they are rounded on the "
            "way, by a cast before or after their reduction"
        )


def _partial(evidence: Evidence) -> Iterator[str]:
    """Gradients that are right, in all or in some elements, once they are added up over tp."""
    wrong = _first(evidence)
    for axis in evidence.layout.names(Role.TENSOR):
        whole = [fqn for fqn, found in wrong.items() if _all(found, axis, "summed")]
        mixed = [fqn for fqn, found in wrong.items() if fqn not in whole and _all(found, axis, "mixed")]
        if whole:
            modules = list(dict.fromkeys(map(_module, whole)))
            yield (
                f"the gradients of {_some(whole)} are partial over {axis}: added up over its ranks they are right, so "
                f"a reduction over {axis} is missing in the backward of {_some(modules)}"
            )
        if mixed:
            yield (
                f"a part of the gradients of {_some(mixed)} is partial over {axis}: the gradient that comes back to "
                f"{_module(mixed[-1])} is not reduced over {axis} where a cut tensor is joined to a whole one"
            )


def _all(found: Sequence[Deviation], axis: str, how: str) -> bool:
    return all(getattr(deviation, how).get(axis, 1.0) <= _TINY for deviation in found)


def _drifted(evidence: Evidence) -> Iterator[str]:
    ties = [axis.name for axis in evidence.layout.axes if axis.role is Role.STAGE]
    for what in ("gradients", "parameters"):
        groups: dict[tuple[str, ...], list[str]] = {}
        for drift in evidence.drifts:
            if drift.what == what:
                groups.setdefault(drift.axes, []).append(drift.fqn)
        for axes, fqns in groups.items():
            over = " and ".join(axes) or "several axes"
            if set(axes) & set(ties):
                yield (
                    f"the copies of the tied parameter {_some(fqns)} on several stages have other {what}: they are "
                    "summed or updated on one stage only"
                )
            elif what == "gradients":
                yield f"ranks along {over} have other gradients of {_some(fqns)}: they are not reduced over {over}"
            elif not any(drift.what == "gradients" for drift in evidence.drifts):
                yield (
                    f"the copies of {_some(fqns)} drift apart along {over}: their ranks update them differently"
                    f"{_who_differs(evidence, fqns)}"
                )
    buffers = [drift for drift in evidence.drifts if drift.what == "buffers"]
    if buffers:
        over = " and ".join(dict.fromkeys(axis for drift in buffers for axis in drift.axes))
        yield f"the buffers {_some([drift.fqn for drift in buffers])} are not synchronised over {over}"


def _who_differs(evidence: Evidence, fqns: Sequence[str]) -> str:
    """Return which ranks update parameters wrongly, where others do it right, and how; empty where all are wrong."""
    wrong = sorted({rank for _, rank, fqn, d in evidence.deviations("parameters") if fqn in fqns and not d.rel <= 1e-9})
    if not wrong or len(wrong) == len(evidence.ranks):
        return ""
    who = " and ".join(map(evidence.layout.who, wrong[:_SHOWN]))
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


def _clipping(evidence: Evidence) -> Iterator[str]:
    """Right gradients that reach the optimizer scaled otherwise."""
    if _first(evidence) or not evidence.wrong("clipped"):
        return
    expected = [min(1.0, evidence.grad_clip / (norm + 1e-6)) for norm in evidence.told.grad_norms["float64"]]
    for number, right in enumerate(expected):
        factors = [report.steps["float64"].steps[number].clip_factor for report in evidence.ranks]
        wrong = {
            rank: factor for rank, factor in enumerate(factors) if factor is None or abs(factor - right) > 1e-9 * right
        }
        if wrong:
            shown = ", ".join(
                f"{'no single number' if factor is None else format(factor, '.4g')} on rank {rank}"
                for rank, factor in list(wrong.items())[:_SHOWN]
            )
            apart = len({factor and round(factor, 12) for factor in factors}) > 1
            cause = "every rank clips by its local norm" if apart else "they are scaled after the core has clipped them"
            if all(factor is not None and abs(factor - 1.0) <= 1e-9 for factor in factors):
                cause = "they are not clipped"
            yield f"gradients are scaled by {shown} between backward and optimizer, where {right:.4g} is right: {cause}"
            return


def _skipped(evidence: Evidence) -> Iterator[str]:
    wrong = evidence.wrong("parameters")
    if _first(evidence) or evidence.wrong("clipped") or not wrong:
        return
    unmoved = {fqn for report in evidence.ranks for step in report.steps["float64"].steps for fqn in step.unmoved}
    still = sorted(unmoved & wrong.keys())
    if still:
        yield f"the optimizer skips {_some(still)}: the gradients are right, and the parameters stay as they are"
    moved = sorted(wrong.keys() - unmoved)
    explained = moved and [*_updates(evidence, moved)]
    yield from explained or ()
    if moved and not explained:
        yield f"the optimizer updates {_some(moved)} otherwise than on one device, from the same gradients"


def _updates(evidence: Evidence, moved: Sequence[str]) -> Iterator[str]:
    """Updates that are a multiple of the right ones, or off by a multiple of the parameter."""
    steps = [step for report in evidence.ranks for step in report.steps["float64"].steps[:1]]
    for what, name in (("updates", "updates"), ("decays", "decays")):
        found = {fqn: value for step in steps for fqn, value in getattr(step, name).items() if fqn in moved}
        known = {fqn: value for fqn, value in found.items() if value is not None}
        if not known or len(known) < len(found):
            continue
        values = list(known.values())
        middle = sum(values) / len(values)
        if max(values) - min(values) > 1e-3 * abs(middle):
            continue
        if what == "updates":
            yield (
                f"the updates of {_some(sorted(known))} are {middle:.4g} times the right ones, from the same "
                "gradients: the learning rate is another one, or applied more than once"
            )
        else:
            yield (
                f"the updates of {_some(sorted(known))} are off by {middle:.3g} times the parameters themselves: their "
                "weight decay is that of another group"
            )
        return


def _initial(evidence: Evidence) -> Iterator[str]:
    """Weights that are wrong before the first step."""
    wrong = evidence.wrong("initial")
    if not wrong:
        return
    turned = {fqn: found[0].turned for fqn, found in wrong.items() if found[0].turned}
    if turned:
        axes = " and ".join(dict.fromkeys(axis for found in turned.values() for axis in found))
        yield f"the pieces of {_some(sorted(turned))} lie in another order along {axes}: ranks hold each other's pieces"
    ranks = {rank for _, rank, fqn, d in evidence.deviations("initial") if fqn in wrong and not d.rel <= 1e-9}
    if not turned and len(ranks) < len(evidence.ranks):
        shown = " and ".join(evidence.layout.who(rank) for rank in sorted(ranks)[:_SHOWN])
        what = _some(sorted(wrong))
        yield f"{shown} begins with other weights than one device, as {what}: another seed, or no broadcast"
    elif not turned:
        yield f"all ranks begin with other weights than one device: {_some(sorted(wrong))}"


def _stale(evidence: Evidence) -> Iterator[str]:
    stale = evidence.stale()
    if stale:
        yield (
            f"{_some(stale)} is stale: parameters were changed after it was computed from them, as by averaging them "
            "late; it has to be computed when they are final (PARAMETERS_FINAL), after everything that changes them"
        )


def _zero_bubble(evidence: Evidence) -> Iterator[str]:
    """A schedule that looks at parameters after they were freed."""
    if not _first(evidence) or not any(report.keep_unsharded for report in evidence.ranks):
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
    """A reference that is no number."""
    for which, losses in evidence.told.losses.items():
        if not all(map(math.isfinite, losses)):
            label = "float64" if which == "float64" else "the run's dtypes"
            yield f"one device's own loss is not finite in {label}: there is nothing to compare the composition with"


def _forward(evidence: Evidence) -> Iterator[str]:
    """A loss that is wrong before anything was updated."""
    weights = evidence.weights
    if not evidence.is_loss_wrong():
        return
    if weights is not None and weights.residual <= 1e-6 and any(abs(value - 1.0) > 1e-5 for value in weights.values):
        return  # the micro-batches' weights say what there is to say
    right = evidence.told.losses["float64"][0]
    off = abs(evidence.first_loss() - right) / abs(right) if right else abs(evidence.first_loss())
    yield f"the forward computes another loss before any update (off by {off:.3g}); the backward is not to blame"
    module = evidence.first_wrong_module()
    if module is not None and not evidence.biases:
        where = " on " + " and ".join(map(evidence.layout.who, module[1][:_SHOWN])) if module[1] else ""
        yield f"the first module whose output is another one is {module[0]}{where}"
    elif not evidence.biases:
        yield (
            "every module that can be compared returns in the first micro-batch what one device returns: what comes "
            "after the model is to blame, the targets, their mask or the loss, or a later micro-batch"
        )
    for axis in evidence.layout.names(Role.TENSOR) if evidence.biases else ():
        degree = evidence.layout.degrees[axis]
        yield (
            f"{_some(evidence.biases)}: added {degree} times, once a rank along {axis} before the reduction of a "
            "row-cut projection; one device has the run's loss with them as large"
        )


def _batches(evidence: Evidence) -> Iterator[str]:
    same = evidence.same_batches()
    if same is not None:
        axes = " and ".join(evidence.layout.between(same[1], same[2]))
        yield (
            f"the data source hands the same batch to ranks that differ in {axes}: it does not cut by the "
            "data-parallel rank, and one device would see every sample once more"
        )


def _streams(evidence: Evidence) -> Iterator[str]:
    kinds: Mapping[str, str] = {
        "equal_over": "ranks along {axis} draw the same random numbers at {sites}, and hold other samples or features",
        "differs_over": "ranks along {axis} draw other random numbers at {sites}, and hold the same activations there",
        "recompute": "what is computed again in the backward draws other random numbers than the forward did, at "
        "{sites}: activation checkpointing without the state of the generator",
        "repeated": "micro-batches draw the same random numbers at {sites}",
        "more": "random numbers are drawn at {sites} more often than on one device: something is dropped twice",
        "none": "no rank draws random numbers at {sites}, and one device does: it is switched off, or taken out",
    }
    groups: dict[tuple[str, str], list[str]] = {}
    for fault in evidence.streams:
        groups.setdefault((fault.kind, fault.axis), []).append(fault.site)
    for (kind, axis), sites in groups.items():
        yield kinds[kind].format(axis=axis, sites=_some(sites))


def _first(evidence: Evidence) -> dict[str, list[Deviation]]:
    """Return the wrong gradients of the first step that has any."""
    step = evidence.first_wrong_step()
    return {} if step is None else evidence.wrong("gradients", step=step)


_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _not_finite,
    _silent,
    _batches,
    _initial,
    _stale,
    _shares,
    _stage,
    _leftover,
    _narrow,
    _drifted,
    _partial,
    _zero_bubble,
    _clipping,
    _skipped,
    _forward,
    _streams,
)
