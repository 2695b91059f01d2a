"""Codecs of elements and blocks: lossy forms of floating-point tensors on the wire, as pure functions of rows.

Shapes: R rows, one for every rank that a row is sent to; N elements of a row; K blocks of a row; P bytes of its
payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.communication.coded_collectives import Codec

__all__ = ["Cast", "Float8Blocks", "IntegerBlocks", "block_codec"]

_SCALE_BYTES = 4
_LARGEST_FLOAT8 = 448.0  # of e4m3
_ZERO_OF_4_BITS = 8
_CACHED_ELEMENTS = 2**18  # of one thread: 1 MiB in float32


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
        return self._narrow(payload_RP, length).float()

    def decode_into(self, payload_RP: Tensor, out_RN: Tensor, *, add: bool = False) -> None:
        """Write the elements into float32 RN, or add them to it."""
        narrow_RN = self._narrow(payload_RP, out_RN.shape[1])
        out_RN.add_(narrow_RN) if add else out_RN.copy_(narrow_RN)

    def _narrow(self, payload_RP: Tensor, length: int) -> Tensor:
        # Flat: rows without elements have any stride.
        return payload_RP.reshape(-1).view(self.dtype).view(len(payload_RP), length)

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

        payload_RP, values_RP = _empty_payload(x_RN, self.num_bytes(x_RN.shape[1]), self.block)
        q_RN = values_RP if self.bits == 8 else torch.empty(x_RN.shape, dtype=torch.uint8, device=x_RN.device)
        _quantise(x_RN, self.block, self._top, self._narrow, payload_RP, q_RN)
        if self.bits == 4:
            values_RP.copy_(_halves(q_RN))
        return payload_RP

    def _narrow(self, x_MB: Tensor, bytes_MB: Tensor, *, is_within: bool) -> None:
        """Write integers into bytes, those of 4 bits as 1 to 15; overwrites `x_MB`."""
        import torch

        if self.generator is None:
            x_MB.round_()
        else:
            x_MB.add_(torch.empty_like(x_MB).uniform_(generator=self.generator)).floor_()
        if not is_within or self.generator is not None:  # `floor_` may round the largest up, by its error in float32
            # What is not finite is known by its block's scale.
            x_MB.nan_to_num_(0.0, 0.0, 0.0).clamp_(-self._top, self._top)
        if self.bits == 8:
            bytes_MB.view(torch.int8).copy_(x_MB)
        else:
            bytes_MB.copy_(x_MB.add_(_ZERO_OF_4_BITS))

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        return _decoded(self, payload_RP, length)

    def decode_into(self, payload_RP: Tensor, out_RN: Tensor, *, add: bool = False) -> None:
        """Write the elements into float32 RN, or add them to it."""
        import torch

        length = out_RN.shape[1]
        scale_RK, values_RP = _parts(payload_RP, length, self.block)
        if self.bits == 8:
            _scale_up(values_RP.view(torch.int8), scale_RK, self.block, out_RN, add=add)
        else:
            _scale_up(_whole(values_RP)[:, :length], scale_RK, self.block, out_RN, zero=_ZERO_OF_4_BITS, add=add)

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

        def narrow(x_MB: Tensor, bytes_MB: Tensor, *, is_within: bool) -> None:
            bytes_MB.view(torch.float8_e4m3fn).copy_(x_MB if is_within else x_MB.nan_to_num_(0.0, 0.0, 0.0))

        payload_RP, values_RN = _empty_payload(x_RN, self.num_bytes(x_RN.shape[1]), self.block)
        _quantise(x_RN, self.block, _LARGEST_FLOAT8, narrow, payload_RP, values_RN)
        return payload_RP

    def decode(self, payload_RP: Tensor, length: int) -> Tensor:
        """Return the elements, float32 RN."""
        return _decoded(self, payload_RP, length)

    def decode_into(self, payload_RP: Tensor, out_RN: Tensor, *, add: bool = False) -> None:
        """Write the elements into float32 RN, or add them to it."""
        import torch

        scale_RK, values_RN = _parts(payload_RP, out_RN.shape[1], self.block)
        _scale_up(values_RN.view(torch.float8_e4m3fn), scale_RK, self.block, out_RN, add=add)

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


def _in_blocks(x_RN: Tensor, block: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of rows, RKB, each with its numbers among the blocks of a row, and its elements.

    Whole blocks are a view. The last one of a row, where it is shorter, is filled up with zeros by itself: to fill up
    all rows would copy them.
    """
    rows, length = x_RN.shape
    num = length // block
    end = num * block
    if num:
        yield slice(0, num), slice(0, end), x_RN[:, :end].unflatten(1, (num, block))
    if length > end:
        filled = x_RN.new_zeros((rows, 1, block))
        filled[:, 0, : length - end] = x_RN[:, end:]
        yield slice(num, num + 1), slice(end, length), filled


def _has_cheap_values(x: Tensor) -> bool:
    """Return whether code may look at values, as on CPU; other devices are waited for, and fake tensors have none."""
    import torch

    return x.device.type == "cpu" and type(x) is torch.Tensor


def _pieces(x_RKB: Tensor) -> Iterator[tuple[int | slice, slice]]:
    """Return runs of blocks that a core's cache holds, through which all of a codec's passes go before the next.

    On other devices, where a launch costs more than a pass, and for tensors without values it is all of them.
    """
    import torch

    rows, num_blocks, block = x_RKB.shape
    if not _has_cheap_values(x_RKB) or x_RKB.numel() <= _CACHED_ELEMENTS:
        yield slice(0, rows), slice(0, num_blocks)
        return
    size = max(_CACHED_ELEMENTS * torch.get_num_threads() // block, 1)
    yield from ((row, slice(first, first + size)) for row in range(rows) for first in range(0, num_blocks, size))


def _empty_payload(x_RN: Tensor, num_bytes: int, block: int) -> tuple[Tensor, Tensor]:
    """Return memory for payloads, uint8 RP, and what of it is behind the scales."""
    import torch

    payload_RP = torch.empty((len(x_RN), num_bytes), dtype=torch.uint8, device=x_RN.device)
    return payload_RP, payload_RP[:, _SCALE_BYTES * _num_blocks(x_RN.shape[1], block) :]


def _quantise(
    x_RN: Tensor, block: int, top: float, narrow: Callable[..., object], payload_RP: Tensor, values_RN: Tensor
) -> None:
    """Write scales to the beginning of payloads, and elements over their scales as bytes.

    Args:
        x_RN: Elements.
        block: Elements that share a scale.
        top: The largest element of a block, over its scale.
        narrow: Given elements, which it may overwrite, writes their bytes into its second argument; with `is_within`
            they are finite, and none is larger than `top` but for a rounding of float32.
        payload_RP: Of which the scales are written.
        values_RN: Bytes of the elements, uint8.
    """
    import torch

    rows, length = x_RN.shape
    scale_RK = torch.empty((rows, _num_blocks(length, block)), dtype=torch.float32, device=x_RN.device)
    for blocks, elements, x_RKB in _in_blocks(x_RN, block):
        size = elements.stop - elements.start
        is_whole = size == x_RKB.shape[1] * block
        out_RN = values_RN[:, elements]
        bytes_RKB = out_RN.unflatten(1, x_RKB.shape[1:]) if is_whole else torch.empty_like(x_RKB, dtype=torch.uint8)
        scale_RK1 = _scale_of(x_RKB, top)
        scale_RK[:, blocks] = scale_RK1.squeeze(-1)
        # A scale that is no normal number is less exact than its elements, or of one that is not finite.
        is_within = _has_cheap_values(x_RKB) and float(scale_RK1.amin()) >= torch.finfo(torch.float32).tiny
        for piece in _pieces(x_RKB):
            narrow(x_RKB[piece].float() / scale_RK1[piece], bytes_RKB[piece], is_within=is_within)
        if not is_whole:
            out_RN.copy_(bytes_RKB[:, 0, :size])
    payload_RP[:, : scale_RK.shape[1] * _SCALE_BYTES] = scale_RK.view(torch.uint8)


def _decoded(codec: IntegerBlocks | Float8Blocks, payload_RP: Tensor, length: int) -> Tensor:
    import torch

    x_RN = torch.empty((len(payload_RP), length), dtype=torch.float32, device=payload_RP.device)
    codec.decode_into(payload_RP, x_RN)
    return x_RN


def _scale_up(q_RN: Tensor, scale_RK: Tensor, block: int, x_RN: Tensor, *, zero: int = 0, add: bool = False) -> None:
    """Write elements times their block's scale.

    Args:
        q_RN: Of any dtype.
        scale_RK: Of blocks.
        block: Elements that share a scale.
        x_RN: Float32, that is written.
        zero: What stands for zero.
        add: Add them to `x_RN` instead.
    """
    import torch

    for blocks, elements, q_RKB in _in_blocks(q_RN, block):
        size = elements.stop - elements.start
        is_whole = size == q_RKB.shape[1] * block
        out_RN = x_RN[:, elements]
        x_RKB = out_RN.unflatten(1, q_RKB.shape[1:]) if is_whole else torch.empty_like(q_RKB, dtype=torch.float32)
        scale_RK1 = scale_RK[:, blocks].unsqueeze(-1)
        for piece in _pieces(q_RKB):
            part_MB = q_RKB[piece].float()
            part_MB = part_MB.sub_(zero) if zero else part_MB
            if add and is_whole:
                x_RKB[piece].add_(part_MB.mul_(scale_RK1[piece]))
            else:
                torch.mul(part_MB, scale_RK1[piece], out=x_RKB[piece])
        if not is_whole:
            last_RN = x_RKB[:, 0, :size]
            out_RN.add_(last_RN) if add else out_RN.copy_(last_RN)


def _scale_of(x_RKB: Tensor, top: float) -> Tensor:
    """Return the scale of each block, float32 RK1; a block of zeros has one too, by which it can be divided."""
    import torch

    # Two passes that write nothing are faster than one that writes sizes, and one over these. They are of all blocks at
    # once: what is done with scales then costs nothing beside them, which a call for every piece would not.
    largest = torch.maximum(x_RKB.amax(dim=-1, keepdim=True).abs(), x_RKB.amin(dim=-1, keepdim=True).abs()).float()
    # An infinite scale would give a block's zeros back as NaN, and its largest elements as infinity: all are NaN.
    scale = torch.where(largest.isfinite(), largest / top, torch.nan)
    return torch.where(scale == 0, torch.finfo(torch.float32).tiny, scale)


def _parts(payload_RP: Tensor, length: int, block: int) -> tuple[Tensor, Tensor]:
    """Return scales, float32 RK, and the bytes of the elements."""
    import torch

    num = _num_blocks(length, block)
    # A copy: rows of bytes begin anywhere, and float32 only at multiples of its size.
    scales = payload_RP[:, : _SCALE_BYTES * num].clone(memory_format=torch.contiguous_format).view(-1)
    return scales.view(torch.float32).view(len(payload_RP), num), payload_RP[:, _SCALE_BYTES * num :]


def _halves(q_RN: Tensor) -> Tensor:
    """Put two numbers of 4 bits into a byte, the first one low."""
    import torch

    # Flat: the stride of a single row may be odd, and then it is not seen in pairs.
    pairs = torch.nn.functional.pad(q_RN, (0, q_RN.shape[1] % 2)).flatten().view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(q_RN.shape[0], -1)  # the first number of a pair is its low byte


def _whole(values_RP: Tensor) -> Tensor:
    """Return the numbers of 4 bits that `_halves` has put into bytes, uint8, two for every byte."""
    import torch

    pairs = values_RP.to(torch.int16)
    return ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)


def _scaled(x_RN: Tensor, block: int, top: float, steps: float) -> Tensor:
    """Return each element's scale times a number of steps, with room for the roundings of float32."""
    import torch

    scales = [(_scale_of(x_RKB, top) * steps).expand_as(x_RKB).flatten(1) for *_, x_RKB in _in_blocks(x_RN, block)]
    widened = torch.cat(scales, dim=1)[:, : x_RN.shape[1]] if scales else x_RN.float()
    return widened * (1 + 2.0**-10) + x_RN.abs() * 2.0**-20
