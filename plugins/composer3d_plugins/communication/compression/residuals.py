"""Residuals of error feedback, by parameter: kept over steps, saved, and resharded for other numbers of replicas.

Shapes: W replicas; N elements of a rank's shards of the parameters that are reduced together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, RunContext, StoredOrders, torch_compat
from composer3d_plugins.communication.compression.exchange import Owed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Residuals"]

KINDS = ("sender", "owner")  # as in `Owed`


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Placement of a parameter's W residuals, one per replica, stacked in a first dim and sharded like the parameter.

    Args:
        fqn: FQN of the parameter, marked if it is a replica of another stage's.
        parameter: Parameter of this rank.
        mesh: The parameter's mesh, or one of the replicas alone.
        stacked: Placements of the W stacked residuals.
        single: Placements of one residual.
        num_replicas: W.
        shape: Shape of the full parameter.
    """

    fqn: str
    parameter: nn.Parameter
    mesh: Any
    stacked: tuple[Any, ...]
    single: tuple[Any, ...]
    num_replicas: int
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The name in checkpoints: no FQN, as the dims are others."""
        return f"{self.fqn} by replica"


@dataclass(kw_only=True, eq=False)
class Residuals:
    """Residuals of this rank, float32 at least, in the shapes of its shards.

    A step that is not taken, because some rank vetoed it, leaves none behind: those before it are kept until the
    optimizer has stepped. In a checkpoint there is one for each replica; a run with another number of replicas gives
    each of them the mean, so that what is owed to the parameters stays what it was.

    Memory: two of the gradient that this rank sends, and two more from the backward to the optimizer's step.
    Collectives: none, but for parameters that are kept in another order than the model's, which checkpoints gather.

    Args:
        context: Of the run.
    """

    context: RunContext
    _places: dict[str, Place] = field(default_factory=dict)
    _held: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    _before: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def allocate(self, name: str, parameter: nn.Parameter, group: Any) -> None:
        """Make residuals of zeros for a parameter that is reduced over replicas, under its name."""
        import torch

        self._places[name] = _place(name, parameter, group)
        local = _local(parameter)
        wide = torch.promote_types(local.dtype, torch.float32)
        for kind in KINDS:
            self._held[kind][name] = torch.zeros_like(local, dtype=wide)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def owed(self, names: Sequence[str]) -> Owed:
        """Return the residuals of some parameters, one after the other."""
        import torch

        sender_N, owner_N = (torch.cat([self._held[kind][name].reshape(-1) for name in names]) for kind in KINDS)
        return Owed(sender_N=sender_N, owner_N=owner_N)

    def put(self, names: Sequence[str], owed: Owed) -> None:
        """Take what an exchange has left over."""
        for kind, left_N in (("sender", owed.sender_N), ("owner", owed.owner_N)):
            held = self._held[kind]
            pieces = left_N.split([held[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                self._before.setdefault((kind, name), held[name])
                held[name] = piece.view_as(held[name])

    def begin(self) -> None:
        """Return to what was before a step that was not taken."""
        for (kind, name), tensor in self._before.items():
            self._held[kind][name] = tensor
        self._before.clear()

    def taken(self) -> None:
        """End a step that was taken."""
        self._before.clear()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of all replicas by FQN, with W in front of the parameter's dims."""
        return {
            kind: {place.key: self._stack(place, self._held[kind][name]) for name, place in self._places.items()}
            for kind in KINDS
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take them back; those of another number of replicas as their mean."""
        self._before.clear()
        for name, place in self._places.items():
            saved = {kind: state[kind][place.key] for kind in KINDS}
            if saved["sender"].shape[0] == place.num_replicas:
                for kind in KINDS:
                    self._held[kind][name].copy_(self._own(place, saved[kind]))
            else:
                # The mean of what senders have left over, and the sum of what owners have, which no two share.
                owed = saved["sender"].mean(dim=0) + saved["owner"].sum(dim=0)
                self._held["sender"][name].copy_(self._sharded(place, self._stored(place, owed)))
                self._held["owner"][name].zero_()

    def _stack(self, place: Place, local: Tensor) -> Tensor:
        import torch
        from torch.distributed.tensor import DTensor, distribute_tensor

        shape = torch.Size((place.num_replicas, *place.shape))
        stride = torch.empty(shape, device="meta").stride()
        stacked = DTensor.from_local(
            local.unsqueeze(0), place.mesh, place.stacked, run_check=False, shape=shape, stride=stride
        )
        if not self._is_reordered(place):
            return stacked
        full = stacked.full_tensor()
        in_model_order = torch.stack([self.context.in_model_order(place.fqn, each) for each in full.unbind()])
        return distribute_tensor(in_model_order, place.mesh, place.stacked, src_data_rank=None)

    def _own(self, place: Place, saved: Any) -> Tensor:
        """Return this rank's shard of its own residual."""
        import torch
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(saved, DTensor) and not self._is_reordered(place):
            return saved.to_local()[0]
        full = saved.full_tensor() if isinstance(saved, DTensor) else saved
        stored = torch.stack([self._stored(place, each) for each in full.unbind()])
        return distribute_tensor(stored, place.mesh, place.stacked, src_data_rank=None).to_local()[0]

    def _sharded(self, place: Place, full: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(full, place.mesh, place.single, src_data_rank=None).to_local()

    def _is_reordered(self, place: Place) -> bool:
        return place.fqn in self.context.stash(StoredOrders).by_name

    def _stored(self, place: Place, full: Tensor) -> Tensor:
        return self.context.in_stored_order(place.fqn, full)


def _place(fqn: str, parameter: nn.Parameter, group: Any) -> Place:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(parameter, DTensor):
        mesh = DeviceMesh.from_group(group, parameter.device.type)
        return Place(
            fqn=fqn,
            parameter=parameter,
            mesh=mesh,
            stacked=(Shard(0),),
            single=(Replicate(),),
            num_replicas=group.size(),
            shape=tuple(parameter.shape),
        )
    mesh, ranks = parameter.device_mesh, dist.get_process_group_ranks(group)
    dims = [
        dim
        for dim, placement in enumerate(parameter.placements)
        if placement.is_replicate() and dist.get_process_group_ranks(mesh.get_group(dim)) == ranks
    ]
    if len(dims) != 1:
        raise PluginError(
            f'the replicas of "{fqn}" are no dim of its mesh, so that what is owed to it could not be saved',
            hint="write error_feedback = false",
        )
    return Place(
        fqn=fqn,
        parameter=parameter,
        mesh=mesh,
        stacked=tuple(Shard(0) if dim in dims else _behind(each) for dim, each in enumerate(parameter.placements)),
        single=tuple(parameter.placements),
        num_replicas=group.size(),
        shape=tuple(parameter.shape),
    )


def _behind(placement: Any) -> Any:
    """Return a placement with one tensor dim more in front."""
    from torch.distributed.tensor import Shard

    shard = torch_compat.shard_of(placement)
    if shard is None:
        return placement
    behind = shard.dim + 1
    return Shard(behind) if shard.split_factor == 1 else type(placement)(behind, split_factor=shard.split_factor)


def _local(parameter: torch.nn.Parameter) -> Tensor:
    from torch.distributed.tensor import DTensor

    found: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found.detach()
