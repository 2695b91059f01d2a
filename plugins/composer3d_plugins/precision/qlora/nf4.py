"""NF4 codec: a byte layout in which every shard of a matrix' rows or columns can be dequantised by itself.

torchao quantises: 64 consecutive elements of a row have one scale; scales, less their mean, are stored in one byte
each, and a group of scales has one factor. A *piece* is a run of bytes: codes, scales, factor, mean. It covers one
group, or, where tp shards within groups, the largest part that lies in one shard, with its own copy of the factor, so
that values are the same in every layout. A stored w_OI is therefore a uint8 matrix s_OW with W bytes per row, which
FSDP2, tensor parallelism and checkpoints shard between rows or pieces like any tensor.

Shape suffixes: O rows and I columns of a weight, W bytes of a stored row; P pieces, B blocks and G groups of scales of
a matrix, C bytes of codes, S scales of a piece, F bytes of a factor and a mean, E elements under one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK", "Format", "levels"]

BLOCK = 64  # elements per scale
_CODES = BLOCK // 2  # bytes
_SCALING = 8  # bytes of a factor and a mean

# The 16 values of NF4, as torchao rounds them; their indices are the codes.
_LEVELS = (
    (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
    + (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
)  # fmt: skip
_ZEROS = 0x77  # two codes of 0.0


@dataclass(frozen=True, kw_only=True)
class Format:
    """Storage format of a matrix.

    Args:
        group: Scales with a common factor.
        piece: Elements per piece: those of one group, or a part of them.
    """

    group: int
    piece: int

    @classmethod
    def of(cls, in_features: int, *, group: int) -> Format:
        """Return the format of rows of `in_features` elements: groups of at most `group` scales, within one row."""
        fitting = gcd(in_features // BLOCK, group)
        return cls(group=fitting, piece=fitting * BLOCK)

    def fitted(self, runs: Sequence[int]) -> Format | None:
        """Return a format with the same values whose pieces divide runs of these lengths; None if a run is odd."""
        piece = gcd(BLOCK * self.group, *runs)
        piece = piece if piece % BLOCK == 0 else gcd(BLOCK, piece)
        return None if piece % 2 else replace(self, piece=piece)

    @property
    def num_scales(self) -> int:
        """Scales of one piece; 1 for a piece of less than 64 elements, repeated in every piece of its block."""
        return max(self.piece // BLOCK, 1)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.piece // 2 + self.num_scales + _SCALING

    def width(self, in_features: int) -> int:
        """Return the bytes of a stored row."""
        return in_features // self.piece * self.piece_bytes

    def features(self, width: int) -> int:
        """Return the elements of a stored row."""
        return width // self.piece_bytes * self.piece

    def quantised(self, w_OI: Tensor) -> Tensor:
        """Return a matrix in its stored form, uint8 s_OW.

        Args:
            w_OI: Of a multiple of 64 columns.

        Memory: several float32 copies of the matrix, freed on return.
        """
        # The codec computes in float32 under any active mode (`verify` computes in float64).
        with torch_compat.without_torch_functions():
            return self._quantised(w_OI)

    def _quantised(self, w_OI: Tensor) -> Tensor:
        import torch

        module: Any = torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        rows, columns = w_OI.shape
        full_OI = w_OI.detach().float().contiguous()
        made = module.to_nf4(full_OI, BLOCK, self.group)
        codes_BC = made.quantized_data.view(-1, _CODES).clone()
        # A block of zeros has a scale of zero, and its codes would come from 0 / 0.
        codes_BC[full_OI.view(-1, BLOCK).abs().amax(-1) == 0] = _ZEROS
        factors_G1 = made.quantization_factor.view(-1, 1)
        scaling_GF = torch.cat([factors_G1, made.scaler_mean.expand_as(factors_G1)], -1).contiguous().view(torch.uint8)
        scaling_PF = scaling_GF.repeat_interleave(BLOCK * self.group // self.piece, 0)
        scales_BS = made.quantized_scalers.view(-1, self.num_scales).view(torch.uint8)
        scales_PS = scales_BS.repeat_interleave(max(BLOCK // self.piece, 1), 0)
        pieces_PW = torch.cat([codes_BC.view(-1, self.piece // 2), scales_PS, scaling_PF], -1)
        return pieces_PW.view(rows, self.width(columns))

    def dequantised(self, s_OW: Tensor, levels: Tensor) -> Tensor:
        """Return the float32 matrix w_OI of a stored one, or of any of its pieces.

        Args:
            s_OW: Of uint8.
            levels: From `levels`, on its device.
        """
        with torch_compat.without_torch_functions():
            return self._dequantised(s_OW, levels)

    def _dequantised(self, s_OW: Tensor, levels: Tensor) -> Tensor:
        import torch

        pieces_PW, end = s_OW.view(-1, self.piece_bytes), self.piece // 2
        values = levels.index_select(0, pieces_PW[:, :end].reshape(-1).int())
        values_PSE = values.view(-1, self.num_scales, self.piece // self.num_scales)
        scaling_P2 = pieces_PW[:, end + self.num_scales :].contiguous().view(torch.float32)
        scales_PS = pieces_PW[:, end : end + self.num_scales].view(torch.int8) / scaling_P2[:, :1] + scaling_P2[:, 1:]
        return (values_PSE * scales_PS.unsqueeze(-1)).view(s_OW.shape[0], self.features(s_OW.shape[1]))


def levels(device: Any) -> Tensor:
    """Return the two values that each byte of codes encodes, `[256, 2]`."""
    import torch

    with torch_compat.without_torch_functions():
        table = torch.tensor(_LEVELS, dtype=torch.float32, device=device)
        code = torch.arange(256, device=device)
        return torch.stack([table[code >> 4], table[code & 15]], -1)
