"""Gains: factors by which gradients are scaled. Rounding adds errors of either sign, and keeps a tensor's size.

So a factor of 1.02 is detected among rounding errors of 3 %, and by nothing else: a precision plugin runs in the run's
own dtypes alone, has no comparison in float64, and runs on one device too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALL", "Gain", "gains_of"]

ALL = ""  # the name of all gradients together
# Elements of a gradient, of which not all are rounded in one direction by chance.
_MANY = 64
# What no factor explains was at most 0.3 of the whole in the dtypes' own errors, with weights of four bits; a plugin
# that leaves more than that, as one that clamps does, does something else than to multiply.
_ALIKE = 0.3


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A tensor as a multiple of another.

    Args:
        factor: Least-squares factor of the one to the other.
        rest: Norm of the residual, relative to that of the other.
    """

    factor: float
    rest: float

    @property
    def off(self) -> float:
        """Distance of the factor from 1."""
        return abs(self.factor - 1.0)

    @property
    def is_multiple(self) -> bool:
        """Whether the residual is no larger than rounding's."""
        return self.rest <= _ALIKE * self.factor


def gains_of(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, skip_zeros: bool = False
) -> dict[str, Gain]:
    """Return the gain of all gradients together, and of each with many elements; none where all are zero.

    Args:
        actual: Gradients by FQN.
        reference: Those that they are compared with.
        skip_zeros: Leave out elements that are zero: in float16 small ones are.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    both, right, squared = 0.0, 0.0, 0.0
    for fqn, tensor in reference.items():
        if fqn not in actual or actual[fqn].shape != tensor.shape:
            continue
        one, other = actual[fqn].double().flatten().cpu(), tensor.double().flatten().cpu()
        if skip_zeros:
            one, other = one[one != 0.0], other[one != 0.0]
        here = float(one @ other), float(other @ other), float(one @ one)
        both, right, squared = both + here[0], right + here[1], squared + here[2]
        if one.numel() >= _MANY:
            sums[fqn] = here
    sums[ALL] = both, right, squared
    return {fqn: _gain(*found) for fqn, found in sums.items() if found[1] > 0.0}


def _gain(both: float, right: float, squared: float) -> Gain:
    factor = both / right
    return Gain(factor=factor, rest=math.sqrt(max(squared / right - factor * factor, 0.0)))
