"""Rules for what is wrong before a step computes: batches, counts, the loss, the model, axes without an owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from composer3d.verification.causes.cause_wording import some
from composer3d.verification.evidence.kept_state import LOSS_KEEPS
from composer3d.verification.verdict import Evidence

__all__ = ["INPUT_RULES", "kept_by_loss"]


def _not_finite(evidence: Evidence) -> Iterator[str]:
    """A reference that is not finite."""
    for which, losses in evidence.reference.losses.items():
        if not all(map(math.isfinite, losses)):
            label = "float64" if which == "float64" else "the run's dtypes"
            yield f"one device's own loss is not finite in {label}: there is nothing to compare the composition with"


def _silent(evidence: Evidence) -> Iterator[str]:
    for axis in evidence.silent:
        yield (
            f"the owner of {axis} did nothing: every rank along {axis} computes the same, and none of them "
            "communicates; a pattern of its plugin may match nothing"
        )


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
    if evidence.reference.mixing.loss:
        yield (
            "the loss is no sum over samples: what it makes of one depends on the others of its micro-batch, as in a "
            "contrastive loss, or in a mean over other targets than are counted, whose graph does not show its "
            "divisor, so that micro-batches and ranks do not add up to the loss of the global batch; return a sum, and "
            "what it is to be divided by, or gather what is compared"
        )


def _dropped(evidence: Evidence) -> Iterator[str]:
    """Experts that drop tokens by what else a rank's batch has."""
    experts = evidence.reference.mixing.experts
    if experts and any(row.is_summed and row.count == row.expected and not row.ok for row in evidence.rows):
        yield (
            f'how many rows the experts "{experts}" are given depends on the batch of a rank, as where a capacity '
            "drops tokens by order of arrival: every layout trains another model, and what is sent has no formula; let "
            "experts take all tokens that choose them, or a fixed number of tokens each"
        )


def kept_by_loss(evidence: Evidence) -> Iterator[str]:
    """A loss that depends on what it has computed before."""
    kept = [name for name in evidence.reference.kept if name.startswith(LOSS_KEEPS)]
    if kept and (evidence.reference.unrepeatable or evidence.is_loss_wrong()):
        yield (
            f"the loss changes {some(kept)} while it computes, and what it returns depends on that: on how many "
            "micro-batches a rank has computed before, which is another number in every layout; the model is not to "
            "blame. Normalise by what is in the batch, or once a step by what all ranks agree on"
        )


def _written(evidence: Evidence) -> Iterator[str]:
    """A model that loses something when its factory is recorded."""
    written = evidence.reference.written
    if written.loss or written.gradients:
        what = f", at {some([fqn for fqn, _ in written.gradients])}" if written.gradients else ""
        yield (
            f"composing loses or changes something of the model{what}, on one process too: what the factory keeps "
            "outside of parameters, buffers and attributes, or does to a tensor that it does not register; "
            'set [model] build = "host", or pass a module that is built'
        )


INPUT_RULES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _not_finite,
    _silent,
    _batches,
    _counts,
    _mixing,
    _dropped,
    kept_by_loss,
    _written,
)
