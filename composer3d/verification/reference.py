"""Reference steps on one device: the global batch in the run's micro-batches, and the effect of rounding on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d.interfaces import Exports
from composer3d.step import local, reshard_units
from composer3d.torch_compat import is_wrapper_subclass
from composer3d.verification.comparison import largest_of
from composer3d.verification.evidence.gains import gains_of
from composer3d.verification.evidence.kept_state import changed, kept_by_loss
from composer3d.verification.evidence.replica_drift import saved_buffers
from composer3d.verification.evidence.untrained import untrained
from composer3d.verification.one_device import (
    alone,
    copies,
    count_of,
    loss_of,
    microbatches,
    objective_of,
    rest_of_divisor,
)
from composer3d.verification.reference_steps import Reference, ReferenceStep
from composer3d.verification.rounding import larger, noise, rounding, signs, unrepeatable
from composer3d.verification.subject import Arithmetic, Subject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Composition

__all__ = ["make_reference"]


# Of the largest element of all gradients: one rounding of float64.
_NUDGE = 2.0**-52
# Relative: half a rounding of bfloat16, so that weights are rounded otherwise in all dtypes that compute.
_APART = 2.0**-8
_NUM_SAMPLES = 6


def make_reference(subject: Subject, which: Arithmetic, *, degree: int, num_steps: int) -> Reference:
    """Run the steps on one device.

    They are run again, and tolerances are derived from the distance. In the run's own arithmetic the second run is in
    float64 from the same weights: the distance is the rounding error. In float64 the second has gradients perturbed by
    the error of a sum in another order. AdamW amplifies it, where a gradient is as small as its `eps`, by up to lr /
    eps. The rounding error of the own dtypes has the same effect on gradients that are no larger than it: a third run,
    in float64, has gradients perturbed by as much; and so have two more in the run's own arithmetic, where for example
    moments in 8 bits jump from zero to their smallest step. Between them any gradient as small as that changes its
    sign.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        which: Float64 without precision plugins, or the run's own dtypes with them.
        degree: Data-parallel degree of the run, which determines the micro-batches.
        num_steps: Optimizer steps.
    """
    before = kept_by_loss(subject.loss_fn)
    reference = _run(subject, which, degree=degree, num_steps=num_steps, sample=which == "own")
    reference.kept += tuple(changed(before, kept_by_loss(subject.loss_fn)))
    if which == "own":
        exactly = functools.partial(
            _run, subject, "float64", degree=degree, num_steps=num_steps, weights=reference.initial
        )
        exact = exactly(keep=reference.replaced, sample=True)
        apart = noise(reference, exact)
        reference.gains = gains_of(reference.steps[0].gradients, exact.steps[0].gradients, skip_zeros=True)
        nudged = exactly(keep=reference.replaced, nudge=apart)
        reference.rounding = larger(rounding(reference, exact, in_parts=True), rounding(nudged, exact, in_parts=False))
        for sign in (1.0, -1.0):
            moved = {fqn: sign * amount for fqn, amount in apart.items()}
            again = _run(subject, which, degree=degree, num_steps=num_steps, nudge=moved)
            reference.rounding = larger(reference.rounding, rounding(again, reference, in_parts=False))
    else:
        nudged = _run(subject, which, degree=degree, num_steps=num_steps, nudge=_NUDGE)
        reference.rounding = rounding(nudged, reference, in_parts=False)
        reference.unrepeatable = unrepeatable(nudged, reference)
    return reference


def _run(
    subject: Subject,
    which: Arithmetic,
    *,
    degree: int,
    num_steps: int,
    weights: Mapping[str, Tensor] | None = None,
    nudge: float | Mapping[str, float] = 0.0,
    keep: bool = False,
    sample: bool = False,
) -> Reference:
    with alone(subject, which, keep=keep) as run:
        if weights is not None:
            _set_weights(run, weights)
        optimizer, buffers = subject.make_optimizer(run), copies(saved_buffers(run))
        initial = copies({fqn: p for fqn, p in run.named_parameters()})
        reference = Reference(
            initial=initial,
            replaced=bool(run.context.stash(Exports).merges),
            reduce_dtype=run.context.dtypes("").reduce,
        )
        if sample:
            reference.samples = _samples(subject, run, degree, which, weights or initial)
        for number in range(num_steps):
            with run.step(number):
                step = _step(subject, run, optimizer, number, degree, which, nudge)
            if subject.make_averages is not None:
                trained = {fqn for fqn, parameter in run.named_parameters() if parameter.requires_grad}
                before = reference.steps[-1].averages if number else {fqn: initial[fqn] for fqn in trained}
                step.averages = {f: _averaged(before[f], step.parameters[f], subject.decay) for f in trained}
            reference.steps.append(step)
        reference.buffers = copies(saved_buffers(run))
        to_train = [fqn for fqn, parameter in run.named_parameters() if parameter.requires_grad]
        reference.untrained = untrained(to_train, [step.gradients for step in reference.steps])
        apart = (fqn for fqn, buffer in reference.buffers.items() if not buffer.equal(buffers.get(fqn, buffer)))
        reference.kept = tuple(apart)
    return reference


def _averaged(before: Tensor, weight: Tensor, decay: float) -> Tensor:
    wide = before.float() if before.dtype.itemsize < 4 else before
    return decay * wide + (1.0 - decay) * weight.to(wide.dtype)


def _samples(
    subject: Subject, run: Composition, degree: int, which: Arithmetic, weights: Mapping[str, Tensor]
) -> list[float]:
    """Return the first micro-batch's loss at slightly perturbed weights."""
    pieces = microbatches(subject, 0, degree, which)
    counts = [count_of(subject, piece) for piece in pieces]
    # Of matrices only: the weights of a norm are alike, and would all be rounded alike. What wraps a tensor casts it.
    matrices = {
        fqn: weight
        for fqn, weight in weights.items()
        if weight.dim() > 1 and weight.is_floating_point() and not is_wrapper_subclass(type(weight))
    }
    found = []
    for number in range(_NUM_SAMPLES):
        # In their own dtype, so that every arithmetic has the same.
        _set_weights(run, {fqn: signs(w, number).mul_(_APART).add_(1.0).mul_(w) for fqn, w in matrices.items()})
        run.parameters_changed()
        # With a graph, by whose last operation a plain loss is classified as a sum or a mean.
        with run.step(0):
            found.append(
                float(objective_of(loss_of(subject, run, pieces[0], counts[0], counts), counts, backward=False))
            )
        reshard_units(run.parts)  # the next weights are for the shards of what a plugin computes in units
    _set_weights(run, matrices)
    run.parameters_changed()
    return found


def _step(
    subject: Subject,
    run: Composition,
    optimizer: torch.optim.Optimizer,
    number: int,
    degree: int,
    which: Arithmetic,
    nudge: float | Mapping[str, float],
) -> ReferenceStep:
    shares: list[float] = []
    pieces = microbatches(subject, number, degree, which)
    counts = [count_of(subject, piece) for piece in pieces]
    losses = []
    for piece, count in zip(pieces, counts, strict=True):
        losses.append(loss_of(subject, run, piece, count, counts))
        shares.append(float(objective_of(losses[-1], counts, backward=True)))
    rest = rest_of_divisor(losses, counts)
    if rest != 1.0:
        shares = [share * rest for share in shares]
        for _, parameter in run.named_parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(rest)
    # Actions of precision plugins on gradients run now, as in a run, and not in the optimizer's step.
    run.clip_grad_norm_(math.inf)
    parameters = {fqn: p for fqn, p in run.named_parameters() if p.grad is not None}
    gradients = copies({fqn: p.grad for fqn, p in parameters.items()})
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients.values()))
    factor = min(1.0, subject.grad_clip / (norm + 1e-6))
    for parameter in parameters.values():
        assert parameter.grad is not None, "chosen so"
        parameter.grad.mul_(factor)
    # Of the same tensors a file has one copy.
    clipped = gradients if factor == 1.0 else copies({fqn: p.grad for fqn, p in parameters.items()})
    if nudge:
        _nudge(parameters, nudge)
    optimizer.step()
    optimizer.zero_grad()
    return ReferenceStep(
        loss=sum(shares),
        grad_norm=norm,
        gradients=gradients,
        clipped=clipped,
        parameters=copies(dict(run.named_parameters())),
        counts=counts,
        shares=shares,
    )


def _nudge(parameters: Mapping[str, Any], size: float | Mapping[str, float]) -> None:
    """Perturb a gradient's elements up and down by turns: by a fraction of the largest, or by a given size.

    The largest is that of all gradients: where large terms cancel, as in the bias of keys before a softmax, the rest is
    rounding noise of their size, and optimizers that divide by it take full steps on it.
    """
    grads = [local(parameter.grad) for parameter in parameters.values()]
    largest = max((largest_of(grad) for grad in grads if grad.numel()), default=0.0)
    for fqn, parameter in parameters.items():
        grad = local(parameter.grad)
        amount = size * largest if isinstance(size, float) else size.get(fqn, 0.0)
        # What is exactly zero in one order is so in another: rows of tokens that did not occur. Biases cancel.
        felt = (grad != 0) | (grad.dim() == 1)
        if grad.dim() > 1 and not isinstance(size, float):
            # In few digits, though, terms cancel to zero in one order and not in another.
            felt |= felt.any(-1, keepdim=True) & felt.any(-2, keepdim=True)
        grad.add_(signs(grad).mul_(felt).mul_(amount))


def _set_weights(run: Composition, weights: Mapping[str, Tensor]) -> None:
    import torch

    with torch.no_grad():
        for fqn, parameter in run.named_parameters():
            # A plugin may compute in units on one device too, whose parameters are DTensors with one shard.
            if fqn in weights:
                local(parameter).copy_(weights[fqn])
