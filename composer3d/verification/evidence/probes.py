"""Runs on one device that locate a difference: gradients of single micro-batches, module outputs, losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from composer3d.verification.evidence.module_outputs import Output, Outputs, watched_loss, watching
from composer3d.verification.evidence.tied_choices import watching_choices
from composer3d.verification.one_device import (
    alone,
    copies,
    count_of,
    loss_of,
    microbatches,
    objective_of,
    rest_of_divisor,
)
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["first_outputs", "loss_with", "pieces_of"]


def pieces_of(subject: Subject, number: int, *, degree: int, auxiliary_only: bool = False) -> list[dict[str, Tensor]]:
    """Return each micro-batch's own contribution to a step's gradients, in float64, at the initial weights.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        number: Step whose batch is used.
        degree: Data-parallel degree.
        auxiliary_only: Use the auxiliary losses alone; zeros for parameters that they do not reach, an empty list
            without any.
    """
    result, losses = [], []
    with alone(subject, "float64") as run, run.step(0):
        pieces = microbatches(subject, number, degree, "float64")
        counts = [count_of(subject, piece) for piece in pieces]
        for piece, count in zip(pieces, counts, strict=True):
            loss = loss_of(subject, run, piece, count, counts)
            losses.append(replace(loss, sum=loss.sum.detach(), auxiliary=None))
            if auxiliary_only and loss.auxiliary is None:
                return []
            objective_of(replace(loss, sum=0.0 * loss.sum) if auxiliary_only else loss, counts, backward=True)
            result.append(copies({fqn: p.grad for fqn, p in run.named_parameters() if p.grad is not None}))
            for _, parameter in run.named_parameters():
                parameter.grad = None
    rest = rest_of_divisor(losses, counts)
    return [{fqn: rest * tensor for fqn, tensor in piece.items()} for piece in result]


def first_outputs(subject: Subject, *, degree: int, ties: dict[str, int]) -> list[Outputs]:
    """Return outputs of modules and the loss on every data-parallel rank's micro-batches of the first step.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        degree: Data-parallel degree.
        ties: Gets what `watching_choices` finds.
    """
    result: list[Outputs] = []
    # With a graph: a model may need one in its forward, as for a penalty on its own gradients.
    with alone(subject, "float64") as run, run.step(0):
        pieces = microbatches(subject, 0, degree, "float64")
        number = len(pieces) // degree
        for rank in range(degree):
            of_loss: dict[str, list[Output]] = {}
            loss_fn = watched_loss(subject.loss_fn, of_loss)
            with watching(run) as found, watching_choices(run, ties):
                for piece in pieces[rank * number : (rank + 1) * number]:
                    output = run.model(*piece.args, **piece.kwargs)
                    if loss_fn is not None:
                        loss_fn(output, piece.target)
            result.append({**found, **of_loss})
    return result


def loss_with(subject: Subject, *, degree: int, factors: Mapping[str, float]) -> float:
    """Return the loss of the first step on one device, with some parameters multiplied.

    Args:
        subject: Model, manifest, batches, loss and optimizer.
        degree: Data-parallel degree.
        factors: Of parameters, by FQN.
    """
    import torch

    with alone(subject, "float64") as run, run.step(0):
        with torch.no_grad():
            for fqn, parameter in run.named_parameters():
                parameter.mul_(factors.get(fqn, 1.0))
        pieces = microbatches(subject, 0, degree, "float64")
        counts = [count_of(subject, piece) for piece in pieces]
        losses = [loss_of(subject, run, piece, count, counts) for piece, count in zip(pieces, counts, strict=True)]
        shares = sum(float(objective_of(loss, counts, backward=False)) for loss in losses)
        return shares * rest_of_divisor(losses, counts)
