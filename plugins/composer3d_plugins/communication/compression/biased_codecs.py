"""Biased codecs, used with error feedback: the largest elements, and signs.

Shapes: R rows; N elements of a row; K blocks of a row, of B elements; T elements of a block that are sent; P bytes of a
payload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Largest", "Signs"]

_LARGEST_BLOCK = 1 << 15  # places in a block are int16


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest elements of each block in float32, each with its place in it: 6 bytes; the others are zeros.

    Source: Alham Fikri Aji and Kenneth Heafield, Sparse Communication for Distributed Gradient Descent,
    arXiv:1704.05021.

    Args:
        ratio: Part of a block's elements that is sent, one at least.
        block: Elements of a block, 32768 at most.
    """

    ratio: float
    block: int
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"the largest {self.ratio:g} of blocks of {self.block}"

    def _sizes(self, length: int) -> tuple[int, int, int]:
        """Return K, B and T."""
        block = min(self.block, max(length, 1), _LARGEST_BLOCK)
        return -(-length // block), block, max(1, min(block, round(block * self.ratio)))

    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row's payload: values, then places."""
        num_blocks, _, kept = self._sizes(length)
        return 6 * num_blocks * kept

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the payload, uint8 RP."""
        import torch

        num_blocks, block, kept = self._sizes(x_RN.shape[1])
        x_RKB = _in_blocks(x_RN, num_blocks, block)
        # NaN is larger than anything here: a receiver has to see it.
        size_RKB = x_RKB.abs().nan_to_num(math.inf, math.inf)
        place_RKT = size_RKB.sort(dim=2, descending=True, stable=True).indices[:, :, :kept]
        value_RKT = x_RKB.gather(2, place_RKT)
        return torch.cat([_bytes_of(value_RKT), _bytes_of(place_RKT.to(torch.int16))], dim=1)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        import torch

        num_blocks, block, kept = self._sizes(length)
        value_RKT = _read(payload_RP[:, : 4 * num_blocks * kept], torch.float32).view(len(payload_RP), num_blocks, kept)
        place_RKT = _read(payload_RP[:, 4 * num_blocks * kept :], torch.int16).view(len(payload_RP), num_blocks, kept)
        x_RKB = value_RKT.new_zeros(*value_RKT.shape[:2], block)
        return x_RKB.scatter_(2, place_RKT.long(), value_RKT).flatten(1)[:, :length]

    def bound(self, x_RN: Tensor) -> Tensor:
        """Return the largest error of each element: no more than the smallest that is sent of its block."""
        num_blocks, block, kept = self._sizes(x_RN.shape[1])
        size_RKB = _in_blocks(x_RN, num_blocks, block).abs()
        smallest_RK1 = size_RKB.sort(dim=2, descending=True).values[:, :, kept - 1 : kept]
        return smallest_RK1.expand_as(size_RKB).flatten(1)[:, : x_RN.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Signs:
    """One bit an element, its sign, and a float32 a block: the mean of its elements' sizes.

    A block with an element that is not finite is decoded as NaN.
    Source: Hanlin Tang et al., 1-bit Adam, arXiv:2102.02888, section 3.

    Args:
        block: Elements that share a size.
    """

    block: int
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"signs in blocks of {self.block}"

    def num_bytes(self, length: int) -> int:
        """Return the bytes of a row's payload: sizes, then bits."""
        return 4 * -(-length // self.block) + math.ceil(length / 8)

    def encode(self, x_RN: Tensor) -> Tensor:
        """Return the payload, uint8 RP."""
        import torch

        rows, length = x_RN.shape
        size_RK = self._sizes_of(x_RN)
        bit_RN = torch.nn.functional.pad((x_RN >= 0).to(torch.uint8), (0, -length % 8)).view(rows, -1, 8)
        byte_RM = (bit_RN << _shifts(x_RN)).sum(dim=2).to(torch.uint8)
        return torch.cat([_bytes_of(size_RK), byte_RM], dim=1)

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        import torch

        num_blocks = -(-length // self.block)
        size_RK = _read(payload_RP[:, : 4 * num_blocks], torch.float32).view(len(payload_RP), num_blocks)
        bit_RN = ((payload_RP[:, 4 * num_blocks :, None] >> _shifts(payload_RP)) & 1).flatten(1)[:, :length]
        return (bit_RN.float() * 2 - 1) * size_RK.repeat_interleave(self.block, dim=1)[:, :length]

    def bound(self, x_RN: Tensor) -> Tensor:
        """Return the largest error of each element: how far its size is from its block's."""
        size_RN = self._sizes_of(x_RN).repeat_interleave(self.block, dim=1)[:, : x_RN.shape[1]]
        return (x_RN.abs() - size_RN).abs() + (x_RN.abs() + size_RN) * 2.0**-20

    def _sizes_of(self, x_RN: Tensor) -> Tensor:
        """Return the mean size of the elements of each block, RK; NaN where one is not finite."""
        import torch

        rows, length = x_RN.shape
        num_blocks = -(-length // self.block)
        total_RK = _in_blocks(x_RN, num_blocks, self.block).abs().sum(dim=2)
        count_K = total_RK.new_full((num_blocks,), float(self.block))
        if num_blocks:
            count_K[-1] = length - (num_blocks - 1) * self.block
        mean_RK = total_RK / count_K
        return torch.where(mean_RK.isinf(), torch.nan, mean_RK)


def _in_blocks(x_RN: Tensor, num_blocks: int, block: int) -> Tensor:
    """Return float32 RKB, the last block filled up with zeros."""
    import torch

    rows, length = x_RN.shape
    return torch.nn.functional.pad(x_RN.float(), (0, num_blocks * block - length)).view(rows, num_blocks, block)


def _bytes_of(x_RKT: Tensor) -> Tensor:
    import torch

    return x_RKT.flatten(1).contiguous().view(torch.uint8)


def _read(payload_RP: Tensor, dtype: object) -> Tensor:
    """Return bytes as another dtype: a copy, as rows of bytes begin anywhere."""
    import torch

    assert isinstance(dtype, torch.dtype)
    return payload_RP.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)


def _shifts(like: Tensor) -> Tensor:
    import torch

    return torch.arange(8, dtype=torch.uint8, device=like.device)
