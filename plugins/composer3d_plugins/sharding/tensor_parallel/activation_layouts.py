"""Conversion of activations between DTensors over tp and the plain tensors that the model's code sees.

Shapes: B batch, S sequence, D model dim, T degree of tp. Replicated activations are x_BSD on every rank; those that
sequence_parallel shards are x_B(S/T)D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import BatchError, Role, RunContext, TransformError, map_tensors, torch_compat
from composer3d.propagation import strip

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from composer3d.propagation import Marks, ShardSpec

__all__ = ["Activations", "local_results"]


@dataclass(frozen=True)
class Activations:
    """Converts activations to and from DTensors; None means Replicate().

    Args:
        mesh: Of one dim, tp.
        outer: Ranks over which the sequence is sharded before, as by cp.
    """

    mesh: DeviceMesh
    outer: int = 1

    @staticmethod
    def of(mesh: DeviceMesh, context: RunContext) -> Activations:
        """Return those of a run."""
        outer = (context.degrees[axis] for axis in context.layout.names(Role.SEQUENCE))
        return Activations(mesh, math.prod(outer))

    def wrap(self, x: Tensor, placement: Shard | None) -> Tensor:
        """Return the DTensor of a local tensor."""
        import torch
        from torch.distributed.tensor import DTensor, Replicate

        if not torch.compiler.is_compiling() and torch_compat.untransformed(x) is not x:
            raise TransformError(
                "a transform of torch.func (vmap, grad, jvp) goes through a layer that tensor parallelism shards, and "
                "DTensor has no rule for it; call the model with the whole batch, and write torch.autograd.grad(...) "
                "for gradients"
            )
        if torch.compiler.is_compiling() and x.is_contiguous():
            # The stride of a batch of one is whatever made it, so the compiler takes it for a symbol, and torch looks
            # DTensors up by their strides (2.13). Seen anew, it follows from the shape.
            x = x.flatten().view(x.shape)
        return DTensor.from_local(x, self.mesh, [placement or Replicate()], run_check=False)

    def unwrap(self, x: Any, placement: Shard | None) -> Any:
        """Return the local tensor in this placement, with the collectives of the redistribution."""
        from torch.distributed.tensor import Replicate

        return torch_compat.unviewed(x.redistribute(placements=[placement or Replicate()]).to_local())

    def share(self, x: Tensor, placement: Shard | None) -> Tensor:
        """Return the replicated DTensor of a local tensor; 1 all-gather over tp if it is sharded.

        The gradient of a sharded tensor is reduce-scattered.
        """
        from torch.distributed.tensor import Replicate

        wrapped: Any = self.wrap(x, placement)
        return wrapped if placement is None else wrapped.redistribute(placements=[Replicate()])

    def divided(self, x: Tensor, placement: Shard | None) -> Tensor:
        """Return this rank's shard of a replicated x_BSD."""
        self.refuse_uneven(x, placement)
        result: Tensor = self.unwrap(self.wrap(x, None), placement)
        return result

    def refuse_uneven(self, x: Tensor, placement: Shard | None) -> None:
        """Refuse a sequence that is to be sharded and does not divide by tp; `x` is x_BSD.

        Raises:
            BatchError: The length is no multiple of tp.
        """
        degree = self.mesh.size()
        if placement is not None and x.shape[placement.dim] % degree:
            length, unit = f"a sequence of {x.shape[placement.dim]} does", f"tp = {degree}"
            if self.outer > 1:
                length = f"a rank's {x.shape[placement.dim]} positions of a sequence that cp = {self.outer} shards do"
                unit = f"cp x tp = {self.outer * degree}"
            raise BatchError(
                f"{length} not divide by tp = {degree}, as sequence_parallel needs; choose a length that {unit} "
                "divides, or write sequence_parallel = false"
            )


def local_results(output: Any, *, like: Tensor, spec: ShardSpec | None, marks: Marks) -> Any:
    """Return the local tensors of what a module made of a sharded sequence; a router makes several.

    Args:
        output: With DTensors.
        like: The input: results of its leading dims stay sharded, and a projection gives other features.
        spec: The input's mark.
        marks: That make such ones.
    """
    from torch.distributed.tensor import DTensor

    def local(y: Any) -> Any:
        if not isinstance(y, DTensor):
            return y
        found: Tensor = torch_compat.unviewed(y.to_local())
        up_to = 0 if spec is None else spec.placed.dim + 1
        if spec is None or found.shape[:up_to] != strip(like).shape[:up_to]:
            return found
        return marks.mark(found, spec.placed)

    return map_tensors(local, output) if isinstance(output, tuple) else local(output)
