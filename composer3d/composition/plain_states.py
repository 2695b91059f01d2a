"""Plain state dicts, of one device's model, loaded into a model whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import initialisation
from composer3d.errors import StepError
from composer3d.initialisation.parameter_order import StoredOrders
from composer3d.torch_compat import is_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["shard_state"]


def shard_state(module: nn.Module, state: dict[str, Any], prefix: str, context: RunContext, *, assigns: bool) -> None:
    """Replace the full tensors of a state dict by DTensors of this rank's shards, in place.

    Memory: of every tensor this rank's shard, a second time until it is copied. Collectives: none; all ranks hold the
    full tensors.

    Args:
        module: The whole model, resharded.
        state: As `load_state_dict` was given it; tensors that are DTensors stay.
        prefix: Of its keys.
        context: Knows the order in which sharded rows are kept.
        assigns: Whether parameters are to be replaced instead of written.

    Raises:
        StepError: Parameters would be replaced, or are kept in a form that full tensors are not copied into.
    """
    import torch
    from torch.distributed.tensor import DTensor

    tensors: Mapping[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for fqn, own in tensors.items():
        full = state.get(prefix + fqn)
        if not isinstance(own, DTensor) or not isinstance(full, torch.Tensor):
            continue
        if assigns:
            raise StepError(
                f'load_state_dict(assign=True) would put another tensor in the place of "{fqn}", which is sharded, and '
                "in that of the optimizer's; leave assign out"
            )
        if isinstance(full, DTensor) or full.shape != own.shape:  # of other shapes torch says what both are
            continue
        if is_wrapper_subclass(type(own.to_local())):
            raise StepError(
                f'"{fqn}" is kept as {type(own.to_local()).__name__}, which no plain tensor is copied into; load the '
                "weights into the model before compose, or a checkpoint of this run by run.load(...)"
            )
        order = context.stash(StoredOrders).by_name.get(fqn)
        placed = torch.empty_like(own.detach())
        initialisation.place(placed, full if order is None else order.stored(full))
        state[prefix + fqn] = placed
