"""PowerSGD: the mean of gradients as a product of two thin matrices, and its residual.

Shapes: W replicas; a rank's shard of a parameter as a matrix of A rows and B columns; R the rank of the product; N all
elements that travel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import seed_of
from composer3d_plugins.communication.compression.exchange import mean_of_replicas

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Factors", "LowRank"]


@dataclass(kw_only=True, eq=False)
class Factors:
    """The right factors of the last step, B x R, by the name of a parameter: those that the next one begins with.

    They are the same on all replicas. A checkpoint has them for each shard; a run with other shards, or another rank,
    draws them again: its product of the first step is less exact, and what it leaves over is sent later as ever.

    Args:
        rank: R, at most.
        seed: Of the first ones.
    """

    rank: int
    seed: int
    is_dispensable: bool = True
    _keys: dict[str, str] = field(default_factory=dict)
    _held: dict[str, Tensor] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)

    def allocate(self, name: str, tensor: Tensor, *, key: str) -> None:
        """Draw the factor of a tensor that is reduced, where it has one; in checkpoints it is under a key."""
        if tensor.ndim > 1 and self.of(name, _matrix(tensor)) is not None:
            self._keys[name] = key

    def of(self, name: str, matrix_AB: Tensor) -> Tensor | None:
        """Return the factor of a matrix, BR; None where two of them would not be smaller than the matrix is."""
        rows, columns = matrix_AB.shape
        rank = min(self.rank, rows, columns)
        if not rank or rank * (rows + columns) >= rows * columns:
            return None
        held = self._held.get(name)
        if held is None or held.shape != (columns, rank):
            held = self._held[name] = self._drawn(name, columns, rank).to(matrix_AB)
        return held

    def put(self, name: str, factor_BR: Tensor) -> None:
        """Take the factor of this step."""
        self._before.setdefault(name, self._held[name])
        # In memory of its own, as after a load: how a product is summed depends on where a matrix begins.
        self._held[name] = factor_BR.clone()

    def begin(self) -> None:
        """Return to what was before a step that was not taken."""
        self._held |= self._before
        self._before.clear()

    def taken(self) -> None:
        """End a step that was taken."""
        self._before.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return them by key."""
        return {key: self._held[name] for name, key in self._keys.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        """Take them back, but for those of other shards."""
        self._before.clear()
        for name, key in self._keys.items():
            if key in state and state[key].shape == self._held[name].shape:
                self._held[name].copy_(state[key])

    def _drawn(self, name: str, columns: int, rank: int) -> Tensor:
        import torch

        generator = torch.Generator().manual_seed(seed_of(self.seed, "power_sgd", name))
        return torch.randn(columns, rank, generator=generator, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """The mean over replicas of matrices M_AB as P Q^T, with P = orth(mean(M Q)) and then Q = mean(M^T P).

    The means are added in the order of ranks, in the dtype of the matrices. Vectors, and matrices that two factors
    would not be smaller than, are sent as they are.

    Source: Thijs Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    arXiv:1905.13727, algorithm 1.

    Args:
        factors: Those to begin with.
    """

    factors: Factors

    def __str__(self) -> str:
        return f"products of rank {self.factors.rank}"

    def means(self, tensors: Mapping[str, Tensor], group: Any) -> dict[str, Tensor]:
        """Return the means by name, the same bits on all replicas.

        Args:
            tensors: This rank's, of any shapes; those of the same names on all replicas have the same ones.
            group: Process group of W ranks.

        Memory: the tensors again. Collectives: two all-to-alls, and two all-gathers.
        """
        import torch

        matrices, factors = dict[str, "Tensor"](), dict[str, "Tensor"]()
        for name, tensor in tensors.items():
            matrix_AB = _matrix(tensor)
            factor_BR = None if tensor.ndim < 2 else self.factors.of(name, matrix_AB)
            if factor_BR is not None:
                matrices[name], factors[name] = matrix_AB, factor_BR
        whole = {name: tensor for name, tensor in tensors.items() if name not in matrices}
        left = _means([matrix_AB @ factors[name] for name, matrix_AB in matrices.items()] + list(whole.values()), group)
        result = dict(zip(whole, left[len(matrices) :], strict=True))
        left = [torch.linalg.qr(left_AR).Q for left_AR in left[: len(matrices)]]
        products = [matrix_AB.T @ left_AR for matrix_AB, left_AR in zip(matrices.values(), left, strict=True)]
        right = _means(products, group) if products else []
        for name, left_AR, right_BR in zip(matrices, left, right, strict=True):
            self.factors.put(name, right_BR)
            result[name] = (left_AR @ right_BR.T).view_as(tensors[name])
        return result

    def num_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the bytes of both factors of all tensors, and of what is sent as it is."""
        numel = 0
        for name, tensor in tensors.items():
            factor_BR = None if tensor.ndim < 2 else self.factors.of(name, _matrix(tensor))
            rows = _matrix(tensor).shape[0]
            numel += tensor.numel() if factor_BR is None else factor_BR.numel() + rows * factor_BR.shape[1]
        return numel * next(iter(tensors.values())).element_size()


def _matrix(tensor: Tensor) -> Tensor:
    """Return AB: the first dim's rows, of all other dims together."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 and tensor.numel() else tensor.reshape(-1, 1)


def _means(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    import torch

    mean_N = mean_of_replicas(torch.cat([tensor.reshape(-1) for tensor in tensors]), None, group)
    pieces = mean_N.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
