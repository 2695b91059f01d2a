"""Known changes of right values: elementwise ones, other parameters' values, and digits that were rounded away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer3d.torch_compat import without_torch_functions
from composer3d.verification.comparison import difference, largest_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OTHERS", "change_of", "few_digits_say_little", "narrow_dtype"]

# Relative.
_CLOSE = 1e-9
# Elements, of which not all have few digits by chance; relative to the largest of all, what may be noise of float32.
_MANY, _NOISE = 8, 1e-5
# Probability at which few digits of all elements may be chance.
_CHANCE = 1e-5
# How the phrase begins where the values are those of another parameter.
OTHERS = "those of "


def change_of(fqn: str, actual: Tensor, reference: Mapping[str, Tensor], *, elementwise: bool) -> str:
    """Return a phrase for the known change from right values to the actual ones; empty where none fits.

    Args:
        fqn: Name of the parameter.
        actual: Its wrong tensor.
        reference: Right tensors of the parameters whose values it may have, its own among them.
        elementwise: Look for elementwise changes too.
    """
    if not actual.any():
        return ""
    alike = (name for name, tensor in reference.items() if name != fqn and tensor.shape == actual.shape)
    other = next((name for name in alike if difference(actual, reference[name]) <= _CLOSE), "")
    if other:
        return OTHERS + other
    return _elementwise(actual, reference[fqn]) if elementwise else ""


def _elementwise(actual: Tensor, reference: Tensor) -> str:
    import torch

    found, true = actual.double().cpu(), reference.double().cpu()
    if found.shape != true.shape or not bool(found.isfinite().all() and true.any()):
        return ""
    largest = float(found.abs().max())
    candidates = {
        "the absolute values of the right ones": true.abs(),
        "the positive ones of the right ones, and zero for the others": true.clamp(min=0.0),
        "the signs of the right ones, times some number": true.sign() * largest,
        f"the right ones, each cut off at {largest:.4g}": true.clamp(-largest, largest),
        "the squares of the right ones": true.square(),
    }
    if true.dim() == 2 and true.shape[0] == true.shape[1]:
        candidates["the right ones, transposed"] = true.t()
    for what, candidate in candidates.items():
        if difference(found, candidate) <= _CLOSE:
            return what
    kept = found != 0
    if difference(found, torch.where(kept, true, 0.0)) <= _CLOSE:
        return "the right ones, some of them replaced by zero"
    if difference(found.flatten().sort().values, true.flatten().sort().values) <= _CLOSE:
        return "the right ones in another order"
    return ""


def narrow_dtype(actual: Tensor) -> str:
    """Return the narrowest dtype that represents a tensor exactly, if it is narrower than the tensor's own."""
    import torch

    if not actual.any():
        return ""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype.itemsize < actual.dtype.itemsize and bool(_represented(actual, dtype).all()):
            return str(dtype).removeprefix("torch.")
    return ""


def _represented(values: Tensor, dtype: torch.dtype) -> Tensor:
    # In float64 casts to other dtypes do nothing here; this one is to round.
    with without_torch_functions():
        return values.to(dtype).to(values.dtype) == values


def few_digits_say_little(actual: Tensor, reference: Tensor, *, narrow: str, largest: float) -> bool:
    """Return whether few digits of a tensor are no sign of rounding.

    So it is of few elements, and of noise: what is zero by mathematics is rounding noise, multiples of one unit. And
    where the reference has as few, or most of its elements: a sum of some numbers of bf16 is often one of float16, and
    of 16 such sums sometimes all are. The reference's share of these says how probable that is.

    Args:
        actual: A tensor that a narrower dtype represents exactly.
        reference: Of one device.
        narrow: That dtype.
        largest: Of all of the reference's tensors.
    """
    import torch

    if actual.numel() < _MANY or largest_of(actual) <= _NOISE * largest:
        return True
    values = reference[reference != 0]
    share = float(_represented(values, getattr(torch, narrow)).double().mean()) if values.numel() else 0.0
    return bool(share ** int(actual.count_nonzero()) > _CHANCE)
