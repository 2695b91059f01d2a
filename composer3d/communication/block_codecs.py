"""Codecs of elements and blocks: lossy forms of floating-point tensors on the wire, as pure functions of rows.

Shapes: R rows, one for every rank that a row is sent to; N elements of a row; K blocks of a row; P bytes of its
payload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.communication.coded_collectives import Codec

__all__ = ["Cast", "Float8Blocks", "IntegerBlocks", "block_codec"]

_SCALE_BYTES = 4
_LARGEST_FLOAT8 = 448.0  # of e4m3


@dataclass(frozen=True, kw_only=True)
class Cast:
    """Elements in a narrower floating-point dtype, rounded to nearest.

    Args:
        dtype: On the wire.
    """

    dtype: torch.dtype
    is_repeatable: bool = True

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row's payload."""
        return length * self.dtype.itemsize

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the payload, uint8 RP."""
        import torch

        return x_RN.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        return payload_RP.contiguous().view(self.dtype).float()

    def bound(self, x_RN: Tensor) -> Tensor:
        """Return the largest error of each element."""
        import torch

        return x_RN.abs() * torch.finfo(self.dtype).eps / 2 + torch.finfo(self.dtype).tiny


@dataclass(frozen=True, kw_only=True)
class IntegerBlocks:
    """Symmetric integers of 8 or 4 bits, and a float32 scale a block: its largest element is the largest integer.

    A block with an element that is not finite is decoded as NaN. Two integers of 4 bits share a byte.
    Source: Guanhua Wang et al., ZeRO++, arXiv:2306.10209, sections 3.1 and 3.3.

    Args:
        bits: 8 or 4.
        block: Elements that share a scale.
        generator: Of the random numbers of stochastic rounding, which is unbiased, and whose error is up to twice that
            of rounding to nearest; None rounds to nearest.
    """

    bits: int
    block: int
    generator: torch.Generator | None = None

    def __str__(self) -> str:
        return f"int{self.bits} in blocks of {self.block}" + (", rounded stochastically" if self.generator else "")

    @property
    def is_repeatable(self) -> bool:
        """Whether the same elements always have the same payload."""
        return self.generator is None

    @property
    def _top(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row's payload: scales, then integers."""
        return _SCALE_BYTES * _num_blocks(length, self.block) + math.ceil(length * self.bits / 8)

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the payload, uint8 RP."""
        import torch

        length = x_RN.shape[1]
        x_RKB = _in_blocks(x_RN, self.block)
        scale_RK1 = _scale_of(x_RKB, self._top)
        q_RN = (x_RKB / scale_RK1).flatten(1)[:, :length]
        if self.generator is None:
            q_RN = q_RN.round()
        else:
            q_RN = (q_RN + torch.empty_like(q_RN).uniform_(generator=self.generator)).floor()
        # What is not finite is known by its block's scale.
        q_RN = q_RN.nan_to_num(0.0, 0.0, 0.0).clamp(-self._top, self._top).to(torch.int8)
        values_RP = q_RN.view(torch.uint8) if self.bits == 8 else _halves(q_RN)
        return torch.cat([scale_RK1.flatten(1).contiguous().view(torch.uint8), values_RP], dim=1)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        import torch

        scale_RK1, values_RP = _parts(payload_RP, length, self.block)
        if self.bits == 8:
            q_RN = values_RP.contiguous().view(torch.int8).float()
        else:
            low, high = (values_RP & 15).float() - 8, (values_RP >> 4).float() - 8
            q_RN = torch.stack([low, high], dim=-1).flatten(1)[:, :length]
        return (_in_blocks(q_RN, self.block) * scale_RK1).flatten(1)[:, :length]

    def bound(self, x_RN: Tensor) -> Tensor:
        """Return the largest error of each element: half an integer's step, or a whole one."""
        steps = 0.5 if self.generator is None else 1.0
        return _scaled(x_RN, self.block, self._top, steps)


@dataclass(frozen=True, kw_only=True)
class Float8Blocks:
    """Float8 (e4m3), and a float32 scale a block.

    Small elements of a block are more exact than integers would make them, and large ones less. A block with an element
    that is not finite is decoded as NaN.

    Args:
        block: Elements that share a scale.
    """

    block: int
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"fp8 in blocks of {self.block}"

    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row's payload: scales, then elements."""
        return _SCALE_BYTES * _num_blocks(length, self.block) + length

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the payload, uint8 RP."""
        import torch

        x_RKB = _in_blocks(x_RN, self.block)
        scale_RK1 = _scale_of(x_RKB, _LARGEST_FLOAT8)
        q_RN = (x_RKB / scale_RK1).flatten(1)[:, : x_RN.shape[1]].nan_to_num(0.0, 0.0, 0.0)
        values_RN = q_RN.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([scale_RK1.flatten(1).contiguous().view(torch.uint8), values_RN], dim=1)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        import torch

        scale_RK1, values_RN = _parts(payload_RP, length, self.block)
        q_RN = values_RN.contiguous().view(torch.float8_e4m3fn).float()
        return (_in_blocks(q_RN, self.block) * scale_RK1).flatten(1)[:, :length]

    def bound(self, x_RN: Tensor) -> Tensor:
        """Return the largest error of each element: 3 bits of mantissa, and the smallest float8 of its block."""
        return x_RN.abs() / 16 + _scaled(x_RN, self.block, _LARGEST_FLOAT8, 2.0**-10)


def block_codec(name: str, *, block: int = 256, generator: torch.Generator | None = None) -> Codec:
    """Return a codec by its name.

    Args:
        name: bf16, int8, int4 or fp8.
        block: Elements that share a scale.
        generator: For stochastic rounding of integers; None rounds to nearest.
    """
    import torch

    if name == "bf16":
        return Cast(dtype=torch.bfloat16)
    if name == "fp8":
        return Float8Blocks(block=block)
    return IntegerBlocks(bits={"int8": 8, "int4": 4}[name], block=block, generator=generator)


def _num_blocks(length: int, block: int) -> int:
    return -(-length // block)


def _in_blocks(x_RN: Tensor, block: int) -> Tensor:
    """Return RKB, the last block filled up with zeros."""
    import torch

    rows, length = x_RN.shape
    num = _num_blocks(length, block)
    padded = torch.nn.functional.pad(x_RN.float(), (0, num * block - length))
    return padded.view(rows, num, block)


def _scale_of(x_RKB: Tensor, top: float) -> Tensor:
    """Return the scale of each block, RK1; a block of zeros has one too, by which it can be divided."""
    import torch

    largest = x_RKB.abs().amax(dim=2, keepdim=True)
    # An infinite scale would give a block's zeros back as NaN, and its largest elements as infinity: all are NaN.
    scale = torch.where(largest.isinf(), torch.nan, largest / top)
    return torch.where(scale == 0, torch.finfo(torch.float32).tiny, scale)


def _parts(payload_RP: Tensor, length: int, block: int) -> tuple[Tensor, Tensor]:
    """Return scales, float32 RK1, and the bytes of the elements."""
    import torch

    num = _num_blocks(length, block)
    # A copy: rows of bytes begin anywhere, and float32 only at multiples of its size.
    scales = payload_RP[:, : _SCALE_BYTES * num].clone(memory_format=torch.contiguous_format).view(-1)
    return scales.view(torch.float32).view(-1, num, 1), payload_RP[:, _SCALE_BYTES * num :]


def _halves(q_RN: Tensor) -> Tensor:
    """Put two integers of 4 bits into a byte, the first one low."""
    import torch

    shifted = torch.nn.functional.pad((q_RN + 8).to(torch.uint8), (0, q_RN.shape[1] % 2))
    return shifted[:, 0::2] | (shifted[:, 1::2] << 4)


def _scaled(x_RN: Tensor, block: int, top: float, steps: float) -> Tensor:
    """Return each element's scale times a number of steps, with room for the roundings of float32."""
    x_RKB = _in_blocks(x_RN, block)
    widened = (_scale_of(x_RKB, top) * steps).expand_as(x_RKB).flatten(1)[:, : x_RN.shape[1]]
    return widened * (1 + 2.0**-10) + x_RN.abs() * 2.0**-20
