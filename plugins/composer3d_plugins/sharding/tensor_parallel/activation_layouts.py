"""Activations as DTensors over tp, and as the plain tensors that the model's code around them sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import BatchError, torch_compat

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

__all__ = ["Activations"]


@dataclass(frozen=True)
class Activations:
    """Brings activations in and out of DTensors; a cut of None stands for whole ones.

    Args:
        mesh: That of tp alone.
    """

    mesh: DeviceMesh

    def wrap(self, x: Tensor, cut: Shard | None) -> Tensor:
        """Return the DTensor of which a plain tensor is this rank's part."""
        import torch
        from torch.distributed.tensor import DTensor, Replicate

        if torch.compiler.is_compiling() and x.is_contiguous():
            # The stride of a batch of one is whatever made it, so the compiler takes it for a symbol, and torch looks
            # DTensors up by their strides (2.13). Seen anew, it follows from the shape.
            x = x.flatten().view(x.shape)
        return DTensor.from_local(x, self.mesh, [cut or Replicate()], run_check=False)

    def unwrap(self, x: Any, cut: Shard | None) -> Any:
        """Return this rank's plain tensor, whole or its share; collectives as the placement needs."""
        from torch.distributed.tensor import Replicate

        return torch_compat.unviewed(x.redistribute(placements=[cut or Replicate()]).to_local())

    def share(self, x: Tensor, cut: Shard | None) -> Tensor:
        """Return the whole DTensor of which a plain tensor is this rank's part; an all-gather over tp where it is cut.

        The gradient of what is cut is reduce-scattered.
        """
        from torch.distributed.tensor import Replicate

        wrapped: Any = self.wrap(x, cut)
        return wrapped if cut is None else wrapped.redistribute(placements=[Replicate()])

    def refuse_uneven(self, x: Tensor, cut: Shard | None) -> None:
        """Refuse a sequence that is to be cut and does not divide; `x` is whole.

        Raises:
            BatchError: The length is no multiple of tp.
        """
        if cut is not None and x.shape[cut.dim] % self.mesh.size():
            raise BatchError(
                f"a sequence of {x.shape[cut.dim]} does not divide by tp = {self.mesh.size()}, as sequence_parallel "
                "needs"
            )
