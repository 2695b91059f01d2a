"""Projections that exchange a sharded sequence, as another plugin may replace them.

Shapes: B batch, S sequence, T degree of tp, L = S / T; D features of the model, F this rank's features of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composer3d import RunContext, SequenceProjection, SequenceProjections, torch_compat
from composer3d.propagation import eagerly, kind_of, strip
from composer3d_plugins.sharding.tensor_parallel.activation_layouts import Activations
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING
from composer3d_plugins.sharding.tensor_parallel.plan_sources import Made
from composer3d_plugins.sharding.tensor_parallel.region import Region

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Exchanges", "planned_exchanges"]

CLAIM: Literal["sequence_projections"] = "sequence_projections"


def planned_exchanges(model: nn.Module, made: Made) -> dict[str, Literal["gathered", "summed"]]:
    """Return the projections that gather or sum a sharded sequence, with which of the two they do.

    Args:
        model: The whole one.
        made: Its plan.
    """
    found: dict[str, Literal["gathered", "summed"]] = {}
    plain = plain_layers(model)
    for fqn, rule in made.rules.items():
        if not rule.is_sharded or rule.style not in (*EXPANDING, *CONTRACTING) or fqn not in plain:
            continue
        if rule.style in CONTRACTING:
            found[fqn] = "summed"
        elif not any(fqn.startswith(f"{other}.") for other in made.gathered):  # gathered before they are called
            found[fqn] = "gathered"
    return found


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of a part's projections: DTensor's, unless a plugin has claimed them.

    Args:
        mesh: Of one dim, tp.
        context: Of the run.
        activations: Converts activations to and from DTensors.
        plain: FQNs of layers that were plain before their code was propagated; see `plain_layers`.
    """

    mesh: DeviceMesh
    context: RunContext
    activations: Activations
    plain: Collection[str]

    @classmethod
    def of(cls, model: nn.Module, activations: Activations, context: RunContext) -> Exchanges:
        """Return those of a part whose code is not propagated yet."""
        return cls(mesh=activations.mesh, context=context, activations=activations, plain=plain_layers(model))

    def gather_in(self, fqn: str, module: nn.Module, region: Region, placement: Shard | None) -> bool:
        """Let a projection of x_B(S/T)D gather it itself where nobody has; return whether it does."""
        if not self._is_claimed(fqn, placement):
            return False
        assert placement is not None, "claimed only then"
        plain, replaced = module.forward, list[Callable[..., Any]]()

        def forward(x: Tensor) -> Tensor:
            if not replaced or not region.needs_gather(x):
                result: Tensor = plain(region.enter(x, placement))
                return result
            tensors = self._same_dtype(strip(x), *_weights(module))
            y_BSF, x_BSD = replaced[0](*tensors, placement.dim, self.mesh.get_group())
            region.put(x, _Gathered.apply(x_BSD, self.mesh))
            return DTensor.from_local(y_BSF, self.mesh, [Shard(y_BSF.ndim - 1)], run_check=False)

        module.forward = eagerly(forward)
        self._add(fqn, "gathered", replaced)
        return True

    def sum_in(self, fqn: str, module: nn.Module, placement: Shard | None) -> None:
        """Let a projection of x_BS(F/T) sum its products itself, into y_B(S/T)D."""
        if not self._is_claimed(fqn, placement):
            return
        assert placement is not None, "claimed only then"
        plain, replaced = module.forward, list[Callable[..., Any]]()

        def forward(x: Any) -> Tensor:
            if not replaced:
                result: Tensor = plain(x)
                return result
            self.activations.refuse_uneven(x, placement)
            tensors = self._same_dtype(torch_compat.unviewed(x.to_local()), *_weights(module))
            y_BLD = replaced[0](*tensors, placement.dim, self.mesh.get_group())
            return DTensor.from_local(y_BLD, self.mesh, [placement], run_check=False)

        module.forward = eagerly(forward)
        self._add(fqn, "summed", replaced)

    def _is_claimed(self, fqn: str, placement: Shard | None) -> bool:
        planned = self.context.stash(SequenceProjections).planned
        return bool(self.context.claimants(CLAIM)) and placement is not None and fqn in planned and fqn in self.plain

    def _add(self, fqn: str, kind: Literal["gathered", "summed"], replaced: list[Callable[..., Any]]) -> None:
        made = SequenceProjection(fqn=fqn, kind=kind, group=self.mesh.get_group(), replace=replaced.append)
        self.context.stash(SequenceProjections).made.append(made)

    def _same_dtype(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what autocast, whose operators are not seen from inside, would compute with."""
        device = self.context.device.type
        if not torch.is_autocast_enabled(device):
            return x, weight, bias
        dtype = torch.get_autocast_dtype(device)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _Gathered(torch.autograd.Function):
    """A replicated DTensor whose gradient is a sum over ranks that whoever gathered it takes."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return DTensor.from_local(x_BSD.view_as(x_BSD), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        local: Tensor = grad.to_local()
        if grad.placements[0].is_partial() or ctx.mesh.get_local_rank() == 0:
            return local, None
        return torch.zeros_like(local), None  # whole on every rank: one of them gives it


def plain_layers(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of projections that are a matrix product with their weight, and nothing besides."""
    return frozenset(
        fqn
        for fqn, module in model.named_modules(remove_duplicate=False)
        if "forward" not in vars(module)
        and (type(module) is nn.Linear or (kind_of(module) == "transposed" and type(module).__name__ == "Conv1D"))
    )


def _weights(module: Any) -> tuple[Tensor, Tensor | None]:
    """Return a projection's local weight, outputs first, and its local bias."""
    weight: Tensor = module.weight.to_local()
    return (
        weight if kind_of(module) == "linear" else weight.t()
    ), None if module.bias is None else module.bias.to_local()
