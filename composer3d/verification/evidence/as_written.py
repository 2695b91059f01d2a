"""Comparison of a model factory run as written with the model composed from its recording.

A composition records a factory and makes its tensors from the recording; the reference on one device is made the same
way. Whatever a recording loses, such as attributes of parameters, would be missing on both sides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d.initialisation import named_tensors, reachable_tensors
from composer3d.step import to_device
from composer3d.verification.arithmetic import in_double_precision
from composer3d.verification.comparison import EXACT, difference, relative, scale_of
from composer3d.verification.one_device import alone, as_loss_of, count_of, microbatches, objective_of
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import Batch

__all__ = ["AS_WRITTEN", "Written", "as_written"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Differences between the factory as written and the composed model.

    Args:
        loss: Relative difference of the first micro-batch's loss; 0 where that is rounding.
        gradients: Relative differences by FQN, of those beyond rounding; infinity where only one of the two exists.
        unknown: Reason why the factory could not be run as written; empty where it was, or without a factory.
    """

    loss: float = 0.0
    gradients: tuple[tuple[str, float], ...] = ()
    unknown: str = ""


AS_WRITTEN = Written()


def as_written(subject: Subject, *, degree: int) -> Written:
    """Run the factory unrecorded, set its tensors to the composed values, and compare a forward and backward.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        degree: Data-parallel degree.

    Memory: the model a second time, and its gradients. Collectives: none.
    """
    import torch
    from torch import nn

    factory = subject.build()
    if isinstance(factory, nn.Module):
        return AS_WRITTEN
    try:
        # Initialisers draw random numbers; the runs compared below draw none.
        with in_double_precision(), torch.random.fork_rng():
            model = factory().to(subject.device)
    except Exception as error:  # it may need a device, memory or files that a recording does not
        log.debug("the factory cannot be run as written", exc_info=True)
        return Written(unknown=f"{type(error).__name__}: {error}")
    with alone(subject, "float64") as run:
        _give_values(run.model, model)
        model.train(run.model.training)
        pieces = microbatches(subject, 0, degree, "float64")
        counts = [count_of(subject, piece) for piece in pieces]
        with run.step(0):
            loss, gradients = _computed(subject, run.model, pieces[0], counts)
            other, expected = _computed(subject, model, pieces[0], counts)
    off = relative(loss, other)
    return Written(loss=off if off > EXACT else 0.0, gradients=_apart(gradients, expected))


def _give_values(source: nn.Module, target: nn.Module) -> None:
    """Copy the values of one model into the other's tensors, in place."""
    import torch

    values = {**dict(named_tensors(source)), **{r.path: r.tensor for r in reachable_tensors(source)}}
    own = {**dict(named_tensors(target)), **{r.path: r.tensor for r in reachable_tensors(target)}}
    with torch.no_grad():
        for name, tensor in own.items():
            if name in values and values[name].shape == tensor.shape:
                tensor.detach().copy_(values[name])


def _computed(subject: Subject, model: nn.Module, piece: Batch, counts: list[int]) -> tuple[float, dict[str, Tensor]]:
    given = to_device(piece, subject.device)
    output = model(*given.args, **given.kwargs)
    loss = as_loss_of(subject, output, given.target, counts[0], counts)
    share = objective_of(loss, counts, backward=True)
    found = {fqn: p.grad.detach() for fqn, p in model.named_parameters() if p.grad is not None}
    return float(share), found


def _apart(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[tuple[str, float], ...]:
    least = scale_of(expected.values())
    found = {
        fqn: difference(actual[fqn], expected[fqn], scale=least) if fqn in actual and fqn in expected else float("inf")
        for fqn in sorted(actual.keys() | expected.keys())
    }
    return tuple((fqn, rel) for fqn, rel in sorted(found.items(), key=lambda pair: -pair[1]) if not rel <= EXACT)
