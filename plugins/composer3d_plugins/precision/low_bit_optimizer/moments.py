"""Codec of moments: block-wise quantisation and dequantisation.

A plain moment of any shape is quantised as codes of K blocks with one float32 scale each.

Shape suffixes: K blocks of B elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMATS", "Format", "dequantised", "kept_above_zero", "requantise_"]

_NEIGHBOURS = 2


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of quantised moments.

    Args:
        kind: Name of torchao's tensor class.
        block_size: Elements that share a float32 scale.
        min_numel: Tensors with fewer local elements stay float32.
    """

    kind: Literal["8bit", "4bit", "fp8"]
    block_size: int
    min_numel: int = 4096

    def zeros(self, like: Tensor, *, signed: bool) -> Tensor:
        """Return a moment of a plain tensor: quantised if it is large enough and consists of whole blocks."""
        import torch

        if like.numel() < self.min_numel or like.numel() % self.block_size:
            return torch.zeros_like(like, dtype=torch.float32)
        # The tensors have no public name; torchao.optim exports the optimizers that hold them.
        module: Any = torch_compat.import_torchao(f"torchao.optim.subclass_{self.kind}")
        made: Tensor
        if self.kind == "fp8":
            made = module.OptimStateFp8.zeros(like.shape, self.block_size, like.device, dtype=torch.float32)
        else:
            cls = module.OptimState8bit if self.kind == "8bit" else module.OptimState4bit
            made = cls.zeros(like.shape, signed, self.block_size, like.device, dtype=torch.float32)
        return made


FORMATS = {
    "8bit": Format(kind="8bit", block_size=256),
    "4bit": Format(kind="4bit", block_size=128),
    "fp8": Format(kind="fp8", block_size=256),
}


def dequantised(moment: Any) -> Tensor:
    """Return a moment's values in float32; itself if it is not quantised."""
    is_quantised = hasattr(moment, "dequantize") and hasattr(moment, "codes")
    # torchao's tables of values are of torch's default dtype.
    result: Tensor = moment.dequantize().float() if is_quantised else moment
    return result


def kept_above_zero(moment: Any, values: Tensor) -> Tensor:
    """Raise values above zero that would be rounded to zero to the format's smallest number.

    A second moment reaches zero long before the first one beside it does, for it is a square. Adam then divides by eps
    alone, or by what the last gradient gave alone: an element whose gradient is 1e-4 of its block's greatest would step
    by thousands of learning rates once it has none. A second moment that is too large shortens the step instead.
    Source: Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, on the zero point.

    Args:
        moment: Destination of the values; quantised or not.
        values: Second moments of its shape, not negative, float32.
    """
    import torch

    if not hasattr(moment, "codes"):
        return values
    blocks_KB = values.reshape(moment.scale.numel(), -1)
    # torchao takes no smaller number for a block's largest.
    smallest_K1 = _smallest(moment) * blocks_KB.amax(-1, keepdim=True).clamp(min=1e-12)
    # Values near the smallest are rounded to it, and dequantised values have to round-trip.
    raised_KB = (blocks_KB > 0) & (blocks_KB < 0.75 * smallest_K1)
    return torch.where(raised_KB, smallest_K1, blocks_KB).view(values.shape)


def requantise_(moment: Any, values: Tensor) -> None:
    """Write values into a moment so that values dequantised from such a moment round-trip bit for bit.

    Quantising takes a block's largest element for its scale, and the table's smallest entry is not minus the largest:
    if the largest element was negative, its rounded value gives another scale. So the scales that may have been are
    tried, each with its nearest numbers, and a block takes the first that gives its values back. Where none does, since
    another layout has other blocks, it is quantised from scratch.

    Args:
        moment: Quantised or not; changed in place.
        values: Of its shape, float32.
    """
    import torch

    if not hasattr(moment, "codes"):
        moment.copy_(values)
        return
    moment.copy_(values)
    size = values.numel() // moment.scale.numel()
    blocks_KB = values.reshape(-1, size)
    best_codes, best_scale_K = moment.codes.clone(), moment.scale.clone()
    done_K = (dequantised(moment).reshape(-1, size) == blocks_KB).all(-1)
    largest_K = blocks_KB.abs().amax(-1)
    for entry in _entries(moment):
        for offset in range(-_NEIGHBOURS, _NEIGHBOURS + 1):
            if bool(done_K.all()):
                break
            scale_K = _shifted(largest_K / entry, offset)
            _write(moment, blocks_KB, scale_K)
            fits_K = (dequantised(moment).reshape(-1, size) == blocks_KB).all(-1) & ~done_K
            chosen = fits_K.repeat_interleave(best_codes.numel() // fits_K.numel()).view(best_codes.shape)
            best_codes = _where(chosen, moment.codes, best_codes)
            best_scale_K = torch.where(fits_K, scale_K, best_scale_K)
            done_K |= fits_K
    moment.codes.copy_(best_codes)
    moment.scale.copy_(best_scale_K)


def _smallest(moment: Any) -> Tensor | float:
    """Return the smallest number above zero of a format for second moments, where a block's largest is one."""
    import torch

    if not hasattr(moment, "qmap"):
        limits = torch.finfo(moment.codes.dtype)
        return limits.tiny * limits.eps / limits.max
    return torch.where(moment.qmap > 0, moment.qmap, 1.0).min()


def _entries(moment: Any) -> list[float]:
    """Return the absolute table entries that a block's largest element may have been rounded to."""
    import torch

    if not hasattr(moment, "qmap"):
        return [float(torch.finfo(moment.codes.dtype).max)]
    return [1.0, abs(float(moment.qmap[0]))]


def _shifted(scale: Tensor, offset: int) -> Tensor:
    """Return the numbers that are `offset` steps away."""
    import torch

    towards = torch.full_like(scale, float("inf") if offset > 0 else 0.0)
    for _ in range(abs(offset)):
        scale = torch.nextafter(scale, towards)
    return scale


def _write(moment: Any, blocks_KB: Tensor, scale_K: Tensor) -> None:
    """Quantise blocks with given scales, which a largest element enforces."""
    import torch

    normalised_KB = blocks_KB / scale_K.clamp(min=1e-38).view(-1, 1)
    if not hasattr(moment, "qmap"):
        codes = normalised_KB.to(moment.codes.dtype)
    else:
        borders = (moment.qmap[1:] + moment.qmap[:-1]) / 2
        codes = torch.bucketize(normalised_KB, borders, right=True).to(torch.uint8).reshape(-1)
        if moment.codes.numel() < codes.numel():
            codes = (codes[::2] << 4) | codes[1::2]
    moment.codes.copy_(codes.view(moment.codes.shape))
    moment.scale.copy_(scale_K)


def _where(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Select codes; float8 has no kernel for it, so they are compared as bytes."""
    import torch

    if one.dtype is torch.uint8:
        return torch.where(chosen, one, other)
    return torch.where(chosen, one.view(torch.uint8), other.view(torch.uint8)).view(one.dtype)
