"""Explanations of tensors that differ: those of the step before, fewer digits, another multiple."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from composer3d.verification.comparison import difference
from composer3d.verification.deviations import multiple, narrowed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.verification.reference_steps import ReferenceStep

__all__ = ["averages_of", "digits_of", "late_ones", "leftovers_of", "updates_of"]

# Relative.
_CLOSE = 1e-9
_APART = 1e-6


def digits_of(
    gradients: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    reduce_dtype: torch.dtype | None,
    wrong: Sequence[str] | None,
) -> dict[str, str]:
    """Return the dtypes of gradients that have lost digits, where the reduction's dtype does not explain it.

    Args:
        gradients: By FQN.
        expected: Gradients of one device, by FQN.
        reduce_dtype: Dtype in which ranks reduce gradients; None where unknown.
        wrong: FQNs to examine; None examines all.
    """
    if wrong is not None:
        return narrowed({fqn: gradients[fqn] for fqn in wrong if fqn in gradients}, expected)
    return {} if reduce_dtype is not None and reduce_dtype.itemsize < 4 else narrowed(gradients, expected)


def updates_of(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    wrong: Sequence[str],
) -> dict[str, dict[str, float | None]]:
    """Return each wrong update's factor to the right one, and the factor of the parameter in its error."""
    off = [fqn for fqn in wrong if fqn in before and fqn in after and fqn in start and fqn in expected]
    return {
        "updates": {fqn: _multiple(after[fqn] - before[fqn], expected[fqn] - start[fqn]) for fqn in off},
        "decays": {fqn: _decay(after[fqn] - expected[fqn], before[fqn], expected[fqn]) for fqn in off},
    }


def _multiple(update: Tensor, right: Tensor) -> float | None:
    """Return an update's factor to the right one: as a whole, or where it is wrong."""
    found = multiple(update, right)
    if found is not None or update.shape != right.shape or not right.numel():
        return found
    # Updates are differences of parameters, and have fewer digits than they.
    wrong = (update - right).abs() > _APART * right.abs().max()
    return multiple(update[wrong], right[wrong])


def _decay(off: Tensor, before: Tensor, updated: Tensor) -> float | None:
    """Return the factor of the parameter in an update's error: of the one before it, or of the updated one."""
    found = multiple(off, before)
    return multiple(off, updated) if found is None else found


def late_ones(gradients: Mapping[str, Tensor], previous: ReferenceStep | None, wrong: Sequence[str]) -> tuple[str, ...]:
    """Return the wrong gradients that are the right ones of the previous step."""
    if previous is None:
        return ()
    there = [fqn for fqn in wrong if fqn in gradients and fqn in previous.gradients]
    return tuple(fqn for fqn in there if difference(gradients[fqn], previous.gradients[fqn]) <= _CLOSE)


def averages_of(
    averaged: Mapping[str, Tensor], weights: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, float | None]:
    """Return the weight of the parameters in each average's update, from its change and theirs."""
    return {
        fqn: multiple(average - before[fqn].to(average), weights[fqn].to(average) - before[fqn].to(average))
        for fqn, average in averaged.items()
        if fqn in before
    }


def leftovers_of(
    gradients: Mapping[str, Tensor], expected: ReferenceStep, previous: ReferenceStep | None, wrong: Sequence[str]
) -> dict[str, float | None]:
    """Return, for each wrong gradient, the factor of the previous step's gradient in its error; None if none."""
    if previous is None:
        return {}
    there = gradients.keys() & expected.gradients.keys() & previous.gradients.keys()
    return {
        fqn: multiple(gradients[fqn] - expected.gradients[fqn], previous.gradients[fqn])
        for fqn in wrong
        if fqn in there
    }
