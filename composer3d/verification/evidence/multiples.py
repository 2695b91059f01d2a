"""Relations of tensors to known ones: what a wrong tensor, its error or its change is a multiple of."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from composer3d.verification.comparison import fit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Multiple", "Multiples", "common", "multiple_of", "of_averages", "of_gradients", "of_shards", "of_updates"]

# Relative residuals: gradients are compared as they are; errors and updates are differences, and have fewer digits.
_EXACT, _OF_DIFFERENCES = 1e-6, 1e-4
# Of the largest element of the right update: what is nearer to it is right.
_APART = 1e-6
# Relative: the multiples of several tensors that are one number.
_ALIKE = 1e-3


class Multiple(enum.Enum):
    """Relation of a tensor to a known one."""

    RIGHT = "the tensor, to the right one"
    EARLIER = "the tensor, to the right one of the step before"
    EARLIER_BESIDES = "the error, to the right tensor of the step before"
    UPDATE = "the change in the step, to the right change"
    PARAMETER_BESIDES = "the error, to the parameter itself"
    WEIGHTS = "the change of a moving average, to the one that takes it to the weights"


# The factor of each relation that was asked for; None where the tensor is no multiple.
Multiples: TypeAlias = Mapping[Multiple, float | None]


def multiple_of(actual: Tensor, known: Tensor, *, residual: float = _OF_DIFFERENCES) -> float | None:
    """Return the factor between two tensors; None where the one is no multiple of the other.

    Args:
        actual: Any tensor.
        known: Of the same shape.
        residual: Largest difference that is left, relative to the multiple's largest element.
    """
    found = fit(actual, known)
    return found.factor if found is not None and found.residual <= residual else None


def common(factors: Iterable[float | None], *, rel: float = _ALIKE, least: float = 0.0) -> float | None:
    """Return the one factor that all are; None where one is missing, or they differ.

    Args:
        factors: Of one relation of several tensors.
        rel: Largest difference, relative to the first.
        least: Difference that is always allowed.
    """
    found = list(factors)
    known = [factor for factor in found if factor is not None]
    if not known or len(known) < len(found):
        return None
    return known[0] if max(known) - min(known) <= max(least, rel * abs(known[0])) else None


def of_gradients(
    fqns: Iterable[str], actual: Mapping[str, Tensor], right: Mapping[str, Tensor], earlier: Mapping[str, Tensor]
) -> dict[str, Multiples]:
    """Relate gradients to those of the step before.

    Args:
        fqns: Wrong ones.
        actual: By FQN.
        right: Those of one device.
        earlier: Those of one device in the step before; empty in the first.
    """
    return {
        fqn: {
            Multiple.EARLIER: multiple_of(actual[fqn], earlier[fqn], residual=_EXACT),
            Multiple.EARLIER_BESIDES: multiple_of(actual[fqn] - right[fqn], earlier[fqn]),
        }
        for fqn in fqns
        if fqn in actual and fqn in right and fqn in earlier
    }


def of_updates(
    fqns: Iterable[str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    right_before: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
) -> dict[str, Multiples]:
    """Relate updates to the right ones, and their errors to the parameters.

    Args:
        fqns: Wrong ones.
        before: Parameters before the step, by FQN.
        after: Those after it.
        right_before: Those of one device before the step.
        right: Those of one device after it.
    """
    return {
        fqn: {
            Multiple.UPDATE: _update(after[fqn] - before[fqn], right[fqn] - right_before[fqn]),
            Multiple.PARAMETER_BESIDES: _of_either(after[fqn] - right[fqn], before[fqn], right[fqn]),
        }
        for fqn in fqns
        if fqn in before and fqn in after and fqn in right_before and fqn in right
    }


def of_averages(
    fqns: Iterable[str], averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, Multiples]:
    """Relate moving averages to the weights that they take in.

    Args:
        fqns: Wrong ones.
        averages: By FQN, after the step.
        weights: Parameters after the step.
        before: Averages of one device before the step.
    """
    found: dict[str, Multiples] = {}
    for fqn in fqns:
        if fqn in averages and fqn in before:
            now, then = averages[fqn], before[fqn].to(averages[fqn])
            found[fqn] = {Multiple.WEIGHTS: multiple_of(now - then, weights[fqn].to(now) - then)}
    return found


def of_shards(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Relate this rank's shards of gradients before the optimizer to those that the backward left, by FQN."""
    fits = {fqn: fit(tensor, before[fqn]) for fqn, tensor in after.items() if fqn in before}
    return {
        fqn: None if found.residual > _EXACT and found.factor else found.factor
        for fqn, found in fits.items()
        if found is not None
    }


def _update(update: Tensor, right: Tensor) -> float | None:
    """Return an update's factor to the right one: as a whole, or where it is wrong."""
    found = multiple_of(update, right)
    if found is not None or update.shape != right.shape or not right.numel():
        return found
    wrong = (update - right).abs() > _APART * right.abs().max()
    return multiple_of(update[wrong], right[wrong])


def _of_either(error: Tensor, before: Tensor, after: Tensor) -> float | None:
    """Return an error's factor to the parameter before its update, or after it."""
    found = multiple_of(error, before)
    return multiple_of(error, after) if found is None else found
