"""Rules for a loss that is wrong before anything was updated: the first module whose output differs."""

from __future__ import annotations

from collections.abc import Iterator

from composer3d.mesh import Role
from composer3d.verification.causes.cause_wording import names_of, some
from composer3d.verification.evidence.module_outputs import INPUTS, LOSS, TARGETS, Difference
from composer3d.verification.verdict import Evidence

__all__ = ["forward"]


def forward(evidence: Evidence) -> Iterator[str]:
    """A loss that is wrong before anything was updated."""
    weights = evidence.weights
    if not evidence.is_loss_wrong() or evidence.wrong("initial"):
        return
    if weights is not None and weights.residual <= 1e-6 and any(abs(value - 1.0) > 1e-5 for value in weights.values):
        return  # the micro-batches' weights say what there is to say
    right = evidence.reference.losses["float64"][0]
    off = abs(evidence.first_loss() - right) / abs(right) if right else abs(evidence.first_loss())
    if not evidence.wrong("gradients", step=0):
        yield f"all gradients are right, and only the loss that is returned is another one (off by {off:.3g})"
        return
    yield f"the forward computes another loss before any update (off by {off:.3g}); the backward is not to blame"
    if not evidence.biases:
        yield _first_wrong(evidence, evidence.first_wrong_output())
        yield from _ties(evidence)
    for axis in evidence.layout.names(Role.TENSOR) if evidence.biases else ():
        degree = evidence.layout.degrees[axis]
        yield (
            f"{some(evidence.biases)}: added {degree} times, once a rank along {axis} before the reduction of a "
            "row-cut projection; one device has the run's loss with them as large"
        )


def _ties(evidence: Evidence) -> Iterator[str]:
    """Choices whose result depends on the order of sums."""
    for fqn, number in evidence.reference.ties.items():
        yield (
            f"{fqn or 'the loss'} chooses among equals on one device, in {number} rows of the first step: the last "
            "that is chosen and the first that is not differ by rounding alone, so that another order of sums chooses "
            "otherwise, as any layout's may; start the router, or whatever makes these scores, from random weights"
        )


def _first_wrong(evidence: Evidence, found: Difference | None) -> str:
    """Return a sentence on the first module, or step after the model, whose output differs."""
    where = "" if found is None or not found.ranks else " on " + names_of(evidence, found.ranks)
    if found is not None and found.is_missing:
        return f"the model is not given the argument {found.fqn.split()[-1]} that the batch has{where}"
    if found is not None and found.fqn.startswith(INPUTS):
        return (
            f"the model is given another argument {found.fqn.split()[-1]} than the batch has{where}: another order, "
            "cut or shift before the first module"
        )
    if found is not None and found.fqn not in (TARGETS, LOSS):
        calls = max(len(evidence.reference.outputs[0].get(found.fqn, ())) // evidence.microbatches, 1)
        number = found.call // calls
        when = f", first in micro-batch {number}" if number else ""
        if found.due is not None and found.due // calls != number:
            when += f", where it computes what is due in micro-batch {found.due // calls}"
        kept = [fqn for fqn in evidence.reference.kept if fqn.startswith(f"{found.fqn}.")]
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
