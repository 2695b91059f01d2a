"""One device: the whole global batch, cut as the run cuts it, through the plain model.

Nothing of the step's own code is used for what it is to judge: losses are counted, divided, summed and clipped here in
a few lines, so that a mistake there shows as a difference.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from composer3d.batch import cut, map_tensors, to_device
from composer3d.evaluation import let_go
from composer3d.gradients import local
from composer3d.loss import as_loss, count_valid, reduction_of
from composer3d.proof.activations import Output, Outputs, watched_loss, watching
from composer3d.proof.replicas import saved_buffers
from composer3d.proof.rounding import larger, noise, rounding, signs, unrepeatable
from composer3d.proof.subject import Arithmetic, Kept, Subject, without_plugins
from composer3d.protocol import Batch, Loss
from composer3d.testing.parity import full
from composer3d.torch_compat import is_wrapper_subclass

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Reference", "ReferenceStep", "first_outputs", "loss_with", "make_reference", "of_dtype", "pieces_of"]


# Of the largest element of all gradients: one rounding of float64.
_NUDGE = 2.0**-52
# Relative: half a rounding of bfloat16, so that weights are rounded otherwise in all dtypes that compute.
_APART = 2.0**-8
_NUM_SAMPLES = 6


@dataclass(kw_only=True, eq=False)
class ReferenceStep:
    """What one step computes on one device.

    Args:
        loss: Mean over the valid tokens of the global batch.
        grad_norm: Of the whole model's gradient.
        gradients: By FQN, as the backward leaves them.
        clipped: By FQN, as the optimizer sees them.
        parameters: By FQN, after the step.
        counts: Valid tokens of every micro-batch, in the order of data-parallel ranks.
        shares: Of the loss, of every micro-batch.
        averages: Moving averages by FQN, after the step; empty where the loop keeps none.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    clipped: dict[str, Tensor]
    parameters: dict[str, Tensor]
    counts: list[int]
    shares: list[float]
    averages: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Reference:
    """Steps on one device.

    Args:
        initial: Parameters before the first step, by FQN.
        replaced: A precision plugin trains other parameters than the model's (adapters).
        reduce_dtype: In which a run's ranks would sum up gradients; None where nothing says it.
        steps: One after the other.
        samples: Losses of the first micro-batch at weights that are a little apart from the initial ones.
        rounding: How far this arithmetic is from float64 on the same weights, by what is compared and FQN (empty for
            numbers); in float64, how far rounding in another order comes, through the optimizer and the steps after it.
        unrepeatable: How far a second run of the first step is apart; 0 where that is rounding.
        buffers: Those that are saved, after the last step.
    """

    initial: dict[str, Tensor]
    replaced: bool = False
    reduce_dtype: torch.dtype | None = None
    steps: list[ReferenceStep] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    rounding: dict[str, dict[str, float]] = field(default_factory=dict)
    unrepeatable: float = 0.0
    buffers: dict[str, Tensor] = field(default_factory=dict)


def make_reference(subject: Subject, which: Arithmetic, *, degree: int, num_steps: int) -> Reference:
    """Run the steps on one device.

    They are run again, and the distance is what the tolerance is derived from. In the run's own arithmetic the second
    run is in float64 from the same weights: the distance is what is rounded away. In float64 the second has gradients
    that are off by what a sum in another order leaves. AdamW turns it into more, where a gradient is as small as its
    `eps`, by up to lr / eps. What is rounded away has the same effect, wherever a gradient is no larger: a third run,
    in float64, has gradients that are off by as much; and so have two more in the run's own arithmetic, where moments
    in 8 bits jump from zero to their smallest step, say. Between them any gradient as small as that changes its sign.

    Args:
        subject: What to run.
        which: Float64 without precision plugins, or the run's own dtypes with them.
        degree: Data-parallel degree of the run, which decides how the global batch is cut.
        num_steps: Optimizer steps.
    """
    reference = _run(subject, which, degree=degree, num_steps=num_steps, sample=which == "own")
    if which == "own":
        exactly = functools.partial(
            _run, subject, "float64", degree=degree, num_steps=num_steps, weights=reference.initial
        )
        exact = exactly(keep=reference.replaced, sample=True)
        apart = noise(reference, exact)
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
    with _alone(subject, which, keep=keep) as run:
        if weights is not None:
            _set_weights(run, weights)
        optimizer = subject.make_optimizer(run)
        initial = _copies({fqn: p for fqn, p in run.named_parameters()})
        reference = Reference(
            initial=initial, replaced=bool(run.context.left_out), reduce_dtype=run.context.dtypes("").reduce
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
        reference.buffers = _copies(saved_buffers(run))
    return reference


def _averaged(before: Tensor, weight: Tensor, decay: float) -> Tensor:
    wide = before.float() if before.dtype.itemsize < 4 else before
    return decay * wide + (1.0 - decay) * weight.to(wide.dtype)


def _samples(
    subject: Subject, run: Composition, degree: int, which: Arithmetic, weights: Mapping[str, Tensor]
) -> list[float]:
    """Return the first micro-batch's loss at weights a little apart."""
    pieces = _microbatches(subject, 0, degree, which)
    counts = [_count(subject, piece) for piece in pieces]
    # Of matrices only: the weights of a norm are alike, and would all be rounded alike. What wraps a tensor casts it.
    matrices = {
        fqn: weight
        for fqn, weight in weights.items()
        if weight.dim() > 1 and weight.is_floating_point() and not is_wrapper_subclass(type(weight))
    }
    found = []
    for number in range(_NUM_SAMPLES):
        # In their own dtype, so that every arithmetic has the same.
        _set_weights(run, {fqn: w * (1.0 + _APART * signs(w, number)) for fqn, w in matrices.items()})
        run.parameters_changed()
        # With a graph, by whose last operation a plain loss is known for a sum or a mean.
        with run.step(0):
            found.append(float(_objective(_loss(subject, run, pieces[0], counts[0], counts), counts, backward=False)))
        let_go(run.parts)  # the next weights are for the shards of what a plugin computes in units
    _set_weights(run, matrices)
    run.parameters_changed()
    return found


@contextlib.contextmanager
def _alone(subject: Subject, which: Arithmetic, *, keep: bool = False) -> Iterator[Composition]:
    """Compose the model without plugins, on this process alone; in its own dtypes with those of precision.

    What trains other parameters than the model's is there in float64 too, if it is to be kept: without it there would
    be nothing to compare with. What only rounds is not.
    """
    kept: Kept = "precision" if which == "own" else "conversions" if keep else "nothing"
    # Losses are not scaled here, so nothing is to be unscaled.
    with subject.composed(which, without_plugins(subject.manifest, keep=kept)) as run, run.without_grad_scaler():
        yield run


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
    pieces = _microbatches(subject, number, degree, which)
    counts = [_count(subject, piece) for piece in pieces]
    for piece, count in zip(pieces, counts, strict=True):
        loss = _loss(subject, run, piece, count, counts)
        shares.append(float(_objective(loss, counts, backward=True)))
    parameters = {fqn: p for fqn, p in run.named_parameters() if p.grad is not None}
    gradients = _copies({fqn: p.grad for fqn, p in parameters.items()})
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients.values()))
    factor = min(1.0, subject.grad_clip / (norm + 1e-6))
    for parameter in parameters.values():
        assert parameter.grad is not None, "chosen so"
        parameter.grad.mul_(factor)
    clipped = _copies({fqn: p.grad for fqn, p in parameters.items()})
    if nudge:
        _nudge(parameters, nudge)
    optimizer.step()
    optimizer.zero_grad()
    return ReferenceStep(
        loss=sum(shares),
        grad_norm=norm,
        gradients=gradients,
        clipped=clipped,
        parameters=_copies(dict(run.named_parameters())),
        counts=counts,
        shares=shares,
    )


def _nudge(parameters: Mapping[str, Any], size: float | Mapping[str, float]) -> None:
    """Move every other element of a gradient up, the rest down: by a fraction of the largest, or by what is given.

    The largest is that of all gradients: where large terms cancel, as in the bias of keys before a softmax, what is
    left is rounding noise of their size, and optimizers that divide by it make full steps of it.
    """
    largest = max((local(p.grad).abs().max() for p in parameters.values() if local(p.grad).numel()), default=0.0)
    for fqn, parameter in parameters.items():
        grad = local(parameter.grad)
        amount = size * largest if isinstance(size, float) else size.get(fqn, 0.0)
        # What is exactly zero in one order is so in another: rows of tokens that did not occur. Biases cancel.
        felt = (grad != 0) | (grad.dim() == 1)
        if grad.dim() > 1 and not isinstance(size, float):
            # In few digits, though, terms cancel to zero in one order and not in another.
            felt |= felt.any(-1, keepdim=True) & felt.any(-2, keepdim=True)
        grad.add_(signs(grad) * felt * amount)


def pieces_of(subject: Subject, number: int, *, degree: int, auxiliary_only: bool = False) -> list[dict[str, Tensor]]:
    """Return, for every micro-batch of a step in float64, what it alone adds to the gradients; weights as at the start.

    Args:
        subject: What to run.
        number: The step whose batch it is.
        degree: Data-parallel degree.
        auxiliary_only: Of the auxiliary losses; zeros where they do not reach, nothing where there are none.
    """
    result = []
    with _alone(subject, "float64") as run, run.step(0):
        pieces = _microbatches(subject, number, degree, "float64")
        counts = [_count(subject, piece) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            loss = _loss(subject, run, piece, count, counts)
            if auxiliary_only and loss.auxiliary is None:
                return []
            _objective(replace(loss, sum=0.0 * loss.sum) if auxiliary_only else loss, counts, backward=True)
            result.append(_copies({fqn: p.grad for fqn, p in run.named_parameters() if p.grad is not None}))
            for _, parameter in run.named_parameters():
                parameter.grad = None
    return result


def first_outputs(subject: Subject, *, degree: int) -> list[Outputs]:
    """Return what modules and the loss return on every data-parallel rank's micro-batches of the first step."""
    import torch

    result: list[Outputs] = []
    with _alone(subject, "float64") as run, run.step(0), torch.no_grad():
        pieces = _microbatches(subject, 0, degree, "float64")
        number = len(pieces) // degree
        for rank in range(degree):
            of_loss: dict[str, list[Output]] = {}
            loss_fn = watched_loss(subject.loss_fn, of_loss)
            with watching(run) as found:
                for piece in pieces[rank * number : (rank + 1) * number]:
                    output = run.model(*piece.args, **piece.kwargs)
                    if loss_fn is not None:
                        loss_fn(output, piece.target)
            result.append({**found, **of_loss})
    return result


def loss_with(subject: Subject, *, degree: int, factors: Mapping[str, float]) -> float:
    """Return the loss of the first step on one device, with some parameters multiplied.

    Args:
        subject: What to run.
        degree: Data-parallel degree.
        factors: By FQN.
    """
    import torch

    with _alone(subject, "float64") as run, run.step(0), torch.no_grad():
        for fqn, parameter in run.named_parameters():
            parameter.mul_(factors.get(fqn, 1.0))
        pieces = _microbatches(subject, 0, degree, "float64")
        counts = [_count(subject, piece) for piece in pieces]
        return sum(
            float(_objective(_loss(subject, run, piece, count, counts), counts, backward=False))
            for piece, count in zip(pieces, counts, strict=True)
        )


def _microbatches(subject: Subject, number: int, degree: int, which: Arithmetic) -> list[Batch]:
    """Return the micro-batches of all data-parallel ranks, rank by rank."""
    size = subject.manifest.train.microbatch
    return [
        to_device(piece, subject.device)
        for rank in range(degree)
        for piece in cut(of_dtype(subject.batch(number, rank, degree), which), size)
    ]


def of_dtype(batch: Batch, which: Arithmetic) -> Batch:
    """Return the batch as it is, or with everything floating-point in float64."""
    import torch

    if which == "own":
        return batch

    def convert(value: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(torch.float64) if tensor.is_floating_point() else tensor, value)

    return Batch(args=convert(batch.args), kwargs=convert(batch.kwargs), target=convert(batch.target))


def _count(subject: Subject, piece: Batch) -> int:
    target = piece.target
    if target is None and subject.loss_fn is None:
        target = piece.kwargs.get("labels")
    if target is None:
        return 1
    return int(subject.count_fn(target)) if subject.count_fn is not None else count_valid(target)


def _loss(subject: Subject, run: Composition, piece: Batch, count: int, counts: list[int]) -> Loss:
    import torch

    output = run.model(*piece.args, **piece.kwargs)
    if subject.loss_fn is not None:
        value = subject.loss_fn(output, piece.target)
    else:
        value = output.loss if hasattr(output, "loss") else output
    scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return as_loss(value, count=count, equal=len(set(counts)) == 1, reduction=reduction_of(value) if scalar else None)


def _objective(loss: Loss, counts: list[int], *, backward: bool) -> Tensor:
    """Divide by the global count before the backward, where the run does it, and return the share of the loss."""
    divisor = max(sum(counts), 1)
    share = loss.sum / divisor
    objective = share if loss.auxiliary is None else share + loss.auxiliary * (loss.count / divisor)
    if backward:
        objective.backward()
    return share.detach()


def _copies(named: Mapping[str, Any]) -> dict[str, Tensor]:
    return {fqn: full(tensor).clone().cpu() for fqn, tensor in named.items()}


def _set_weights(run: Composition, weights: Mapping[str, Tensor]) -> None:
    import torch

    with torch.no_grad():
        for fqn, parameter in run.named_parameters():
            # A plugin may compute in units on one device too, whose parameters are DTensors with one shard.
            if fqn in weights:
                local(parameter).copy_(weights[fqn])
