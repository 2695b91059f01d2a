"""Comparison of tensors, and its tolerances: 1e-12 in float64, derived in the run's own dtypes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "COMPARED",
    "EXACT",
    "Fit",
    "Limits",
    "difference",
    "fit",
    "largest_of",
    "relative",
    "scale_of",
    "told_apart",
    "tolerances",
]

EXACT = 1e-12
# Gradients of the first step, before and after clipping; of later steps, which rest on updates, both together.
COMPARED = ("loss", "grad_norm", "gradients", "clipped", "later", "parameters", "averages", "buffers")
# What float64 rounds, relative to the largest gradient of the model, must stay below EXACT: see `scale_of`.
_FLOOR = 2.0**-52 / EXACT
_SAFETY = 4.0
_UNITS = 4.0


def scale_of(tensors: Iterable[Tensor]) -> float:
    """Return the smallest scale by which a difference in one of these tensors is judged.

    A gradient that is zero by mathematics (the bias of keys before a softmax) is rounding noise on one device and other
    noise in a layout; its relative error means nothing. The noise of float64 is 2^-52 of the summands, which are no
    larger than the largest value of all tensors: that much, and no more, passes as 1e-12.
    """
    return _FLOOR * max((largest_of(tensor) for tensor in tensors if tensor.numel()), default=0.0)


def largest_of(tensor: Tensor) -> float:
    """Return the largest absolute value; NaN where there is one. It reads the tensor once, and writes nothing."""
    import torch

    if not tensor.is_floating_point():
        return float(tensor.abs().max())
    least, most = torch.aminmax(tensor.detach())
    return float(torch.maximum(-least, most))


def difference(actual: Tensor, reference: Tensor, *, scale: float = 0.0) -> float:
    """Return max|actual - reference| / max(max|reference|, scale), in float64; infinity where shapes differ."""
    import torch

    if actual.shape != reference.shape:
        return math.inf
    if not reference.numel():
        return 0.0
    one, other = actual.to("cpu", torch.float64), reference.to("cpu", torch.float64)
    distance = largest_of(one - other)
    if distance == 0.0:
        return 0.0
    largest = max(largest_of(other), scale)
    return distance / largest if largest else math.inf


def told_apart(value: float, other: float = 1.0, *, digits: int = 4) -> str:
    """Return a number with the digits that tell it from another one, two of their difference.

    Args:
        value: The number; a factor is told from 1, which multiplies nothing.
        other: What it would be if all were right.
        digits: Of a number that is far from the other.

    >>> told_apart(2.0), told_apart(1.001), told_apart(1.0002345)
    ('2', '1.001', '1.00023')
    """
    largest = max(abs(value), abs(other))
    share = abs(value - other) / largest if 0.0 < largest < math.inf else 0.0
    # A float has no more than 17.
    return f"{value:.{min(max(digits, 2 - math.floor(math.log10(share))), 17) if share > 0.0 else digits}g}"


def relative(actual: float, reference: float) -> float:
    """Return |actual - reference| / |reference|."""
    if actual == reference:
        return 0.0
    return abs(actual - reference) / abs(reference) if reference else math.inf


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Least-squares fit of a tensor by a multiple of another.

    Args:
        factor: The multiple.
        residual: Largest remaining difference, relative to the multiple's largest value.
    """

    factor: float
    residual: float


def fit(actual: Tensor, reference: Tensor) -> Fit | None:
    """Fit a tensor by a multiple of its reference; None where there is nothing to fit."""
    import torch

    if actual.shape != reference.shape or not reference.numel():
        return None
    one, other = actual.to("cpu", torch.float64).flatten(), reference.to("cpu", torch.float64).flatten()
    square = float(other @ other)
    if not square or not math.isfinite(square):
        return None
    factor = float(one @ other) / square
    rest, size = float((one - factor * other).abs().max()), float((factor * other).abs().max())
    return Fit(factor=factor, residual=rest / size if size else 0.0 if not rest else math.inf)


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits(Mapping[str, float]):
    """Tolerances by compared quantity.

    Args:
        largest: By compared quantity, the largest over all parameters.
        by_fqn: By compared quantity and FQN; a parameter that is missing here has the largest.
    """

    largest: Mapping[str, float]
    by_fqn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.largest[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.largest)

    def __len__(self) -> int:
        return len(self.largest)

    def of(self, name: str, fqn: str) -> float:
        """Return the limit of one parameter."""
        return self.by_fqn.get(name, {}).get(fqn, self.largest[name])

    def stated(self, tolerance: float) -> Limits:
        """Return float64 limits at a stated tolerance, or above it where the optimizer amplifies rounding.

        Args:
            tolerance: Relative; may be below the default of 1e-12.
        """

        def asked(limit: float) -> float:
            return tolerance if limit <= EXACT else max(limit, tolerance)

        return replace(
            self,
            largest={name: asked(limit) for name, limit in self.largest.items()},
            by_fqn={name: {fqn: asked(limit) for fqn, limit in limits.items()} for name, limits in self.by_fqn.items()},
        )


def tolerances(rounding: Mapping[str, Mapping[str, float]], dtype: torch.dtype | None) -> Limits:
    """Return the tolerances of every compared quantity.

    In float64 every tolerance is 1e-12, or, for quantities after an optimizer step, four times the optimizer's
    amplification of a rounding of the gradients, if that is more: of each parameter separately, since it amplifies
    gradients that are zero by mathematics, and no others.

    In the run's own dtypes the composition and the reference are two roundings of one exact computation, with as many
    roundings each and in another order: their errors are of one size, and their distance at most the sum of the two.
    The reference's error is measured, of each parameter by itself, against float64 on the same weights. Twice that
    bounds the distance, and twice again covers reductions over ranks, which add roundings of their own. One measurement
    may be small by luck, so no parameter's error is taken for less than what a quarter of them exceed, nor than four
    units of the dtype.

    Args:
        rounding: From `Reference`: by compared quantity and FQN, the largest over steps.
        dtype: The narrowest compute dtype; None in float64.
    """
    import torch

    most = {name: max(rounding.get(name, {}).values(), default=0.0) for name in COMPARED}
    if dtype is None:
        return Limits(
            largest={name: max(EXACT, _SAFETY * most[name]) for name in COMPARED},
            by_fqn={
                name: {fqn: max(EXACT, _SAFETY * error) for fqn, error in rounding.get(name, {}).items() if fqn}
                for name in COMPARED
            },
        )
    unit = torch.finfo(dtype).eps
    by_fqn = {}
    for name, errors in rounding.items():
        upper = statistics.quantiles(errors.values(), n=4)[2] if len(errors) > 1 else most[name]
        least = max(_UNITS * unit, upper)
        by_fqn[name] = {fqn: _SAFETY * max(error, least) for fqn, error in errors.items()}
    return Limits(largest={name: _SAFETY * max(most[name], _UNITS * unit) for name in COMPARED}, by_fqn=by_fqn)
