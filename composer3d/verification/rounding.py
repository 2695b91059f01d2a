"""Rounding differences between two runs on one device, from which tolerances are derived."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer3d.verification.comparison import COMPARED, difference, largest_of, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.verification.reference_steps import Reference

__all__ = ["larger", "noise", "rounding", "signs", "unrepeatable"]

# Relative, and far above the error of a float64 sum in another order, as with atomic additions.
_SAME = 1e-10


def noise(rounded: Reference, exact: Reference) -> dict[str, float]:
    """Return the largest difference of any element of a gradient, by FQN."""
    found: dict[str, float] = {}
    for one, other in zip(rounded.steps, exact.steps, strict=True):
        for fqn in one.clipped.keys() & other.clipped.keys():
            distance = one.clipped[fqn].double() - other.clipped[fqn].double()
            found[fqn] = max(found.get(fqn, 0.0), largest_of(distance) if distance.numel() else 0.0)
    return found


def larger(
    one: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the larger of two distances, by compared quantity and parameter."""
    return {
        name: {fqn: max(one[name].get(fqn, 0.0), other[name].get(fqn, 0.0)) for fqn in {**one[name], **other[name]}}
        for name in one
    }


def rounding(rounded: Reference, exact: Reference, *, in_parts: bool) -> dict[str, dict[str, float]]:
    """Return the largest distance over steps, by compared quantity and parameter.

    A single number may be close by chance. With `in_parts` the distance of the loss is that of the micro-batch or
    sample with the largest one, and the distance of the norm is the gradient's.
    """
    result: dict[str, dict[str, float]] = {name: {} for name in COMPARED}

    def note(name: str, fqn: str, distance: float) -> None:
        result[name][fqn] = max(result[name].get(fqn, 0.0), distance)

    for sample, true in zip(rounded.samples, exact.samples, strict=False):
        note("loss", "", abs(sample - true) / abs(true) if true else 0.0)
    for number, (one, other) in enumerate(zip(rounded.steps, exact.steps, strict=True)):
        for name in ("loss", "grad_norm"):
            value, true = getattr(one, name), getattr(other, name)
            note(name, "", abs(value - true) / abs(true) if true else 0.0)
        if in_parts:
            pairs = zip(one.shares, other.shares, strict=True)
            note("loss", "", max(abs(share - true) / abs(true) if true else 0.0 for share, true in pairs))
            note("grad_norm", "", _apart(one.gradients, other.gradients) / (other.grad_norm or 1.0))
        for name in ("gradients", "clipped", "parameters", "averages"):
            mine, true_ones = getattr(one, name), getattr(other, name)
            scale = scale_of(true_ones.values())
            for fqn, tensor in true_ones.items():
                distance = difference(mine[fqn], tensor, scale=scale) if fqn in mine else math.inf
                note("later" if number and name in ("gradients", "clipped") else name, fqn, distance)
    for fqn, buffer in exact.buffers.items():
        if fqn in rounded.buffers:
            note("buffers", fqn, difference(rounded.buffers[fqn], buffer, scale=1.0))
    return result


def _apart(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients of the model."""
    there = gradients.keys() & exact.keys()
    return math.sqrt(sum(float((gradients[f].double() - exact[f].double()).square().sum()) for f in there))


def unrepeatable(one: Reference, other: Reference) -> float:
    """Return the distance of two runs of one computation before the first update; 0 where it is rounding."""
    first, second = one.steps[0], other.steps[0]
    scale = scale_of(second.gradients.values())
    found = [abs(first.loss - second.loss) / abs(second.loss) if second.loss else 0.0]
    for fqn, tensor in second.gradients.items():
        found.append(difference(first.gradients[fqn], tensor, scale=scale) if fqn in first.gradients else math.inf)
    return next((largest for largest in [max(found)] if largest > _SAME), 0.0)


def signs(tensor: Tensor, level: int = 0) -> Tensor:
    """Return 1 and -1 by turns, each 2^level times."""
    import torch

    turns = torch.ones(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    width = 1 << level
    whole = tensor.numel() // (2 * width) * 2 * width
    turns[:whole].view(-1, 2, width)[:, 1].fill_(-1.0)
    turns[whole + width :].fill_(-1.0)
    return turns.view_as(tensor)
