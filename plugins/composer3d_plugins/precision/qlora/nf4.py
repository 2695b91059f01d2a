"""NF4 codec: matrices stored so that every shard of their rows or columns is self-contained.

torchao quantises: 64 neighbours of a row share a scale, and the scales, less their mean, are kept in one byte, of which
some share a factor. A piece is one run of bytes: codes, scales, factor, mean. It has the weights that share such a
factor, or where tp splits those, the largest part of them in one shard, with a copy of the factor: values are the same
in every layout. So a stored w_OI is a uint8 matrix s_OW of W bytes a row, and FSDP2, tensor parallelism and checkpoints
shard it between rows or pieces without knowing its format.
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

BLOCK = 64  # weights that share a scale
_CODES = BLOCK // 2  # bytes
_SCALING = 8  # bytes of a factor and a mean

# Values of the format, as torchao rounds them; their indices are stored.
_LEVELS = (
    (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0)
    + (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
)  # fmt: skip
_ZEROS = 0x77  # two codes of 0.0


@dataclass(frozen=True, kw_only=True)
class Format:
    """Storage format of a matrix.

    Args:
        group: Scales that share a factor.
        piece: Weights per piece: all that share a factor, or a part of them.
    """

    group: int
    piece: int

    @classmethod
    def of(cls, in_features: int, *, group: int) -> Format:
        """Return the format of rows of a length: groups of at most `group` scales that do not cross rows."""
        fitting = gcd(in_features // BLOCK, group)
        return cls(group=fitting, piece=fitting * BLOCK)

    def cut(self, runs: Sequence[int]) -> Format | None:
        """Return the format of the same values for ranks with runs of these lengths; None if one is odd."""
        piece = gcd(BLOCK * self.group, *runs)
        piece = piece if piece % BLOCK == 0 else gcd(BLOCK, piece)
        return None if piece % 2 else replace(self, piece=piece)

    @property
    def num_scales(self) -> int:
        """Scales of one piece; 1 for a piece of less than 64 weights, shared with other pieces."""
        return max(self.piece // BLOCK, 1)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.piece // 2 + self.num_scales + _SCALING

    def width(self, in_features: int) -> int:
        """Return the bytes of a row of weights."""
        return in_features // self.piece * self.piece_bytes

    def features(self, width: int) -> int:
        """Return the weights in a row of bytes."""
        return width // self.piece_bytes * self.piece

    def quantised(self, weight: Tensor) -> Tensor:
        """Return a matrix in its stored form, uint8 `[out, width]`.

        Args:
            weight: `[out, in]`, in a multiple of 64.

        Memory: several float32 copies of the matrix for a moment.
        """
        # Bytes are decoded in float32, whatever mode is active around (verify computes in float64).
        with torch_compat.without_torch_functions():
            return self._quantised(weight)

    def _quantised(self, weight: Tensor) -> Tensor:
        import torch

        module: Any = torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        rows, columns = weight.shape
        full = weight.detach().float().contiguous()
        made = module.to_nf4(full, BLOCK, self.group)
        codes = made.quantized_data.view(-1, _CODES).clone()
        # A block of zeros has no scale that its elements could be divided by.
        codes[full.view(-1, BLOCK).abs().amax(-1) == 0] = _ZEROS
        factors = made.quantization_factor.view(-1, 1)
        scaling = torch.cat([factors, made.scaler_mean.expand_as(factors)], -1).contiguous().view(torch.uint8)
        scaling = scaling.repeat_interleave(BLOCK * self.group // self.piece, 0)
        scales = made.quantized_scalers.view(-1, self.num_scales).view(torch.uint8)
        scales = scales.repeat_interleave(max(BLOCK // self.piece, 1), 0)
        stored = torch.cat([codes.view(-1, self.piece // 2), scales, scaling], -1)
        return stored.view(rows, self.width(columns))

    def dequantised(self, stored: Tensor, levels: Tensor) -> Tensor:
        """Return the float32 matrix `[out, in]` of a stored one, or of any of its pieces.

        Args:
            stored: `[out, width]`.
            levels: From `levels`, on its device.
        """
        with torch_compat.without_torch_functions():
            return self._dequantised(stored, levels)

    def _dequantised(self, stored: Tensor, levels: Tensor) -> Tensor:
        import torch

        pieces, end = stored.view(-1, self.piece_bytes), self.piece // 2
        values = levels.index_select(0, pieces[:, :end].reshape(-1).int())
        values = values.view(-1, self.num_scales, self.piece // self.num_scales)
        scaling = pieces[:, end + self.num_scales :].contiguous().view(torch.float32)
        scales = pieces[:, end : end + self.num_scales].view(torch.int8) / scaling[:, :1] + scaling[:, 1:]
        return (values * scales.unsqueeze(-1)).view(stored.shape[0], self.features(stored.shape[1]))


def levels(device: Any) -> Tensor:
    """Return the two weights that every byte of codes encodes, `[256, 2]`."""
    import torch

    with torch_compat.without_torch_functions():
        table = torch.tensor(_LEVELS, dtype=torch.float32, device=device)
        code = torch.arange(256, device=device)
        return torch.stack([table[code >> 4], table[code & 15]], -1)
