"""Stable seeds, and digests by which ranks compare their values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["fingerprints", "first_difference", "seed_of"]

# Words of 8 bytes mixed at once: bounds the temporaries to some 32 MB for tensors of any size.
_CHUNK = 1 << 20
# Two odd constants with well spread bits (the fractional parts of the golden ratio and of the square root of 2).
_SPREAD, _STEP = 0x1E3779B97F4A7C15, 0x6A09E667F3BCC909


def seed_of(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on the parts alone: the same in every process, on every machine, for ever.

    The parts are joined with their lengths, so ("a", "bc") and ("ab", "c") differ.

    >>> seed_of(0, "layers.0.weight", 0) == seed_of(0, "layers.0.weight", 0) != seed_of(1, "layers.0.weight", 0)
    True
    """
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def fingerprints(module: nn.Module) -> dict[str, int]:
    """Return a 64-bit digest of the values of each parameter and buffer, by FQN, each tensor once.

    Every 8 bytes are mixed, multiplied by an odd number that depends on their position, and added up; tensors that
    differ in one bit differ for certain, others by all odds. Runs where the tensor is, at memory speed. Of a sharded
    tensor it digests this rank's shard.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {fqn: _digest(tensor) for fqn, tensor in tensors}


def _digest(tensor: Tensor) -> int:
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        data = local.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        total = seed_of(str(local.dtype), *local.shape)
        for start in range(0, data.numel(), 8 * _CHUNK):
            piece = data[start : start + 8 * _CHUNK]
            words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=data.device)
            words.view(torch.uint8)[: piece.numel()].copy_(piece)
            words.mul_(_SPREAD)
            words.bitwise_xor_(words >> 32)
            position = torch.arange(start // 8, start // 8 + words.numel(), device=data.device)
            words.mul_(position.mul_(2 * _STEP).add_(1))
            total += int(words.sum())
    return total % (1 << 64)


def first_difference(digests_by_rank: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    """Return the first FQN on which ranks disagree and the ranks that do not have what rank 0 has; None if all agree.

    A tensor that only some ranks hold is a difference too.

    Args:
        digests_by_rank: The fingerprints of every rank, in the order of ranks.
    """
    for fqn in dict.fromkeys(fqn for digests in digests_by_rank for fqn in digests):
        expected = digests_by_rank[0].get(fqn)
        ranks = [rank for rank, digests in enumerate(digests_by_rank) if digests.get(fqn) != expected]
        if ranks:
            return fqn, ranks
    return None
