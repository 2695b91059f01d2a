"""Diagnosis rules for known mistakes: each reads the evidence and names a likely cause, or none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from composer3d.mesh import Role
from composer3d.verification.causes.cause_wording import SHOWN, some
from composer3d.verification.causes.gradient_causes import GRADIENT_RULES, backward
from composer3d.verification.causes.microbatch_shares import explain_shares
from composer3d.verification.causes.scaled_gradients import multiplied
from composer3d.verification.causes.update_causes import UPDATE_RULES, initial, stale
from composer3d.verification.evidence.deviations import Deviation
from composer3d.verification.evidence.kept_state import LOSS_KEEPS
from composer3d.verification.evidence.module_outputs import INPUTS, LOSS, TARGETS, Difference
from composer3d.verification.restored_run import causes_of_restored
from composer3d.verification.verdict import Evidence

__all__ = ["UNREPEATABLE", "diagnose"]


# Relative to the largest element; the coarsest dtype, float8 with two digits, rounds by an eighth.
_MORE_THAN_ROUNDED = 0.25


def diagnose(evidence: Evidence) -> list[str]:
    """Return the likely causes, each once, the most telling first."""
    if evidence.told.unrepeatable:
        return [*_kept_by_loss(evidence)] or [UNREPEATABLE]
    lines = [line for rule in (*_FIRST_RULES, *GRADIENT_RULES) for line in rule(evidence)]
    lines += backward(evidence, is_explained=bool(lines))
    lines += [line for rule in (_forward, *UPDATE_RULES, _streams, causes_of_restored) for line in rule(evidence)]
    return list(dict.fromkeys(lines or _roundings(evidence)))


UNREPEATABLE = (
    "the model computes something else each time, on one device too, with torch's random numbers out of the way: it "
    "draws others (random, numpy, the clock), or keeps something from one run to the next; nothing compares with it"
)


def _kept_by_loss(evidence: Evidence) -> Iterator[str]:
    """A loss that depends on what it has computed before."""
    kept = [name for name in evidence.told.kept if name.startswith(LOSS_KEEPS)]
    if kept and (evidence.told.unrepeatable or evidence.is_loss_wrong()):
        yield (
            f"the loss changes {some(kept)} while it computes, and what it returns depends on that: on how many "
            "micro-batches a rank has computed before, which is another number in every layout; the model is not to "
            "blame. Normalise by what is in the batch, or once a step by what all ranks agree on"
        )


def _silent(evidence: Evidence) -> Iterator[str]:
    for axis in evidence.silent:
        yield (
            f"the owner of {axis} did nothing: every rank along {axis} computes the same, and none of them "
            "communicates; a pattern of its plugin may match nothing"
        )


def _shares(evidence: Evidence) -> Iterator[str]:
    yield from explain_shares(evidence)


def _not_finite(evidence: Evidence) -> Iterator[str]:
    """A reference that is not finite."""
    for which, losses in evidence.told.losses.items():
        if not all(map(math.isfinite, losses)):
            label = "float64" if which == "float64" else "the run's dtypes"
            yield f"one device's own loss is not finite in {label}: there is nothing to compare the composition with"


def _forward(evidence: Evidence) -> Iterator[str]:
    """A loss that is wrong before anything was updated."""
    weights = evidence.weights
    if not evidence.is_loss_wrong() or evidence.wrong("initial"):
        return
    if weights is not None and weights.residual <= 1e-6 and any(abs(value - 1.0) > 1e-5 for value in weights.values):
        return  # the micro-batches' weights say what there is to say
    right = evidence.told.losses["float64"][0]
    off = abs(evidence.first_loss() - right) / abs(right) if right else abs(evidence.first_loss())
    if not evidence.wrong("gradients", step=0):
        yield f"all gradients are right, and only the loss that is returned is another one (off by {off:.3g})"
        return
    yield f"the forward computes another loss before any update (off by {off:.3g}); the backward is not to blame"
    if not evidence.biases:
        yield _first_wrong(evidence, evidence.first_wrong_output())
    for axis in evidence.layout.names(Role.TENSOR) if evidence.biases else ():
        degree = evidence.layout.degrees[axis]
        yield (
            f"{some(evidence.biases)}: added {degree} times, once a rank along {axis} before the reduction of a "
            "row-cut projection; one device has the run's loss with them as large"
        )


def _first_wrong(evidence: Evidence, found: Difference | None) -> str:
    """Return a sentence on the first module, or step after the model, whose output differs."""
    where = "" if found is None or not found.ranks else " on " + _who(evidence, found.ranks)
    if found is not None and found.is_missing:
        return f"the model is not given the argument {found.fqn.split()[-1]} that the batch has{where}"
    if found is not None and found.fqn.startswith(INPUTS):
        return (
            f"the model is given another argument {found.fqn.split()[-1]} than the batch has{where}: another order, "
            "cut or shift before the first module"
        )
    if found is not None and found.fqn not in (TARGETS, LOSS):
        calls = max(len(evidence.told.outputs[0].get(found.fqn, ())) // evidence.microbatches, 1)
        number = found.call // calls
        when = f", first in micro-batch {number}" if number else ""
        if found.due is not None and found.due // calls != number:
            when += f", where it computes what is due in micro-batch {found.due // calls}"
        kept = [fqn for fqn in evidence.told.kept if fqn.startswith(f"{found.fqn}.")]
        if kept:
            when += (
                f"; its forwards change {some(kept)}: if what it returns depends on them, it depends on the layout, "
                "since one device has computed the micro-batches of all ranks, one after the other"
            )
        return f"the first module whose output is another one is {found.fqn}{where}{when}"
    after = "the targets, their mask or the loss, or what cannot be compared"
    if found is not None and found.fqn == TARGETS:
        after = f"the loss is given other targets than the batch has{where}: another mask, shift or order"
    elif found is not None:
        after = f"the loss returns another value{where}, from the same targets and right outputs"
    return (
        "every module that can be compared returns in every micro-batch what one device returns: what comes after the "
        f"model is to blame: {after}"
    )


def _who(evidence: Evidence, ranks: Sequence[int]) -> str:
    return " and ".join(map(evidence.layout.who, ranks[:SHOWN]))


def _roundings(evidence: Evidence) -> list[str]:
    """Differences in the run's own dtypes alone."""
    if "own" not in evidence.told.tolerances or evidence.first_wrong() is not None or evidence.is_loss_wrong():
        return []
    if any(multiplied(evidence)):
        return [
            "in float64, without the plugins of precision, everything is right, and roundings add errors and do not "
            "multiply: one of those plugins scales gradients, in what it converts, or before the optimizer steps"
        ]
    for kind, what in (("gradients", "the gradients of"), ("parameters", "the updates of")):
        wrong = evidence.wrong(kind, "own")  # type: ignore[arg-type]
        if wrong and _median(wrong) > _MORE_THAN_ROUNDED:
            return [
                f"in float64 everything is right, and in the run's dtypes {what} {some(sorted(wrong))} are other ones, "
                "by more than any dtype rounds: a plugin of precision does something else on one device, or before "
                "gradients are reduced what is to be done after"
            ]
        if wrong:
            return [
                f"in float64 everything is right, and in the run's dtypes {what} {some(sorted(wrong))} are rounded "
                f"more than on one device{_as_much_as(wrong)}: a cast, a dtype of reduction, or a plugin of precision, "
                "where one device has none"
            ]
    return []


def _median(wrong: Mapping[str, Sequence[Deviation]]) -> float:
    return statistics.median(max(deviation.rel for deviation in found) for found in wrong.values())


def _as_much_as(wrong: Mapping[str, Sequence[Deviation]]) -> str:
    """Return a clause naming the dtype whose rounding is about as large as these deviations; empty where none is."""
    off = _median(wrong)
    if not 0.0 < off < math.inf:
        return ""
    # What is rounded once is off by at most half a unit.
    units = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4}
    nearest = min(units, key=lambda name: abs(math.log2(off / units[name])))
    return f", about as much as {nearest} rounds" if abs(math.log2(off / units[nearest])) <= 2.0 else ""


def _batches(evidence: Evidence) -> Iterator[str]:
    same = evidence.same_batches()
    if same is not None:
        axes = " and ".join(evidence.layout.between(same[1], same[2]))
        yield (
            f"the data source hands the same batch to ranks that differ in {axes}: it does not cut by the "
            "data-parallel rank, and one device would see every sample once more"
        )


def _counts(evidence: Evidence) -> Iterator[str]:
    """Tokens that are counted more often, or less, than the batch has them."""
    counted = evidence.other_count()
    if counted is None:
        return
    found, _, right = counted
    times, rest = divmod(found, right) if right else (0, 1)
    what = "more" if found > right else "fewer"
    how = f"{times} times the batch" if not rest else f"{abs(found - right)} {what} than the batch"
    yield (
        f"the ranks together train on {found} valid tokens, {how} has: between the source of data and the model "
        "samples or tokens are repeated or lost, as by what places the batch (composer3d_place_batch)"
    )


def _mixing(evidence: Evidence) -> Iterator[str]:
    """A loss that is no sum over samples or tokens."""
    if evidence.told.mixing.loss:
        yield (
            "the loss is no sum over samples: what it makes of one depends on the others of its micro-batch, as in a "
            "contrastive loss, a mean with class weights, or a mean over other targets than are counted (an "
            "ignore_index other than -100), so that micro-batches and ranks do not add up to the loss "
            "of the global batch; return a sum, and what it is to be divided by, or gather what is compared"
        )


def _written(evidence: Evidence) -> Iterator[str]:
    """A model that loses something when its factory is recorded."""
    written = evidence.told.written
    if written.loss or written.gradients:
        what = f", at {some([fqn for fqn, _ in written.gradients])}" if written.gradients else ""
        yield (
            f"composing loses or changes something of the model{what}, on one process too: what the factory keeps "
            "outside of parameters, buffers and attributes, or does to a tensor that it does not register; "
            'set [model] build = "host", or pass a module that is built'
        )


def _streams(evidence: Evidence) -> Iterator[str]:
    kinds: Mapping[str, str] = {
        "equal_over": "ranks along {axis} draw the same random numbers at {sites}, and hold other samples or features",
        "differs_over": "ranks along {axis} draw other random numbers at {sites}, and hold the same activations there",
        "recompute": "what is computed again in the backward draws other random numbers than the forward did, at "
        "{sites}: activation checkpointing without the state of the generator",
        "repeated": "micro-batches draw the same random numbers at {sites}",
        "steps": "every step draws the same random numbers at {sites} as the one before: something seeds them anew",
        "more": "random numbers are drawn at {sites} more often than on one device: something is dropped twice",
        "fewer": "random numbers are drawn at {sites} less often than on one device{where}: it is switched off there",
        "otherwise": "something is dropped at {sites} with another probability than on one device{where}",
        "none": "no rank draws random numbers at {sites}, and one device does: it is switched off, or taken out",
    }
    groups: dict[tuple[str, str, str], list[str]] = {}
    for fault in evidence.streams:
        is_there = fault.kind in ("fewer", "otherwise") and len(fault.ranks) < len(evidence.ranks)
        where = f" on {_who(evidence, fault.ranks)}" if is_there else ""
        groups.setdefault((fault.kind, fault.axis, where), []).append(fault.site)
    for (kind, axis, where), sites in groups.items():
        yield kinds[kind].format(axis=axis, sites=some(sites), where=where)


_FIRST_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _not_finite,
    _silent,
    _batches,
    _counts,
    _mixing,
    _kept_by_loss,
    _written,
    initial,
    stale,
    _shares,
)
