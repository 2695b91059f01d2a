"""Whole tensors of the model's order of rows written into tensors that are sharded, maybe in another order of rows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d import initialisation
from composer3d.errors import StepError
from composer3d.initialisation.parameter_order import Order, StoredOrders
from composer3d.mesh import BESIDE_EXPERTS, Role
from composer3d.step.sharded_tensors.run_meshes import owners_of, sharded_parameters
from composer3d.step.sharded_tensors.written_values import WrittenValues, is_compared

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from composer3d.context import RunContext

__all__ = ["know_copy", "know_orders", "place_rows", "record_write", "sharded_like", "whole_rows"]

_CONTEXTS: weakref.WeakSet[RunContext] = weakref.WeakSet()
_COPIES: weakref.WeakKeyDictionary[RunContext, list[tuple[str, weakref.ref[Tensor]]]] = weakref.WeakKeyDictionary()


def know_orders(context: RunContext) -> None:
    """Let `place_rows` find the order of rows of a run's parameters."""
    if context.stash(StoredOrders).by_name:
        _CONTEXTS.add(context)


def know_copy(context: RunContext, fqn: str, copied: Tensor) -> None:
    """Let a copy of a parameter have its order of rows."""
    if fqn in context.stash(StoredOrders).by_name:
        _COPIES.setdefault(context, []).append((fqn, weakref.ref(copied)))


def place_rows(target: DTensor, whole: Tensor, *, like: DTensor | None = None, is_written: bool = False) -> None:
    """Write a whole tensor of the model's order of rows into a DTensor.

    Args:
        target: Of any placements.
        whole: The same on all ranks.
        like: Parameter whose order counts, if `target` is none.
        is_written: Whether `like` is to have these values, and not a new tensor.

    Raises:
        StepError: It may be sharded like a parameter that is stored in another order, and is none itself.
    """
    order = _order_of(target if like is None else like, draws=like is not None and not is_written)
    initialisation.place(target, whole if order is None else order.stored(whole))


def whole_rows(tensor: DTensor) -> Tensor:
    """Return the whole of a DTensor in the model's order of rows. Collectives: those of `full_tensor`."""
    order = _order_of(tensor, draws=False)
    whole: Tensor = tensor.full_tensor()
    # Of replicas, and of one rank, it is the tensor itself.
    return whole.clone() if order is None else order.model(whole)


def record_write(target: DTensor, whole: Tensor) -> None:
    """Record writes into a DTensor, and computations with it, for the comparison at the start of the next step."""
    for context in owners_of(target.device_mesh):
        # Ranks along an axis of experts hold other ones, sharded over it, or of a list over the ranks beside it alone.
        own = {*context.layout.names(Role.EXPERT), BESIDE_EXPERTS}
        names = {part for name in target.device_mesh.mesh_dim_names or () for part in name.split("+")}
        if is_compared(context) and not names & own:
            name = functools.partial(_name_of, weakref.ref(context), _storage(target), tuple(target.shape))
            context.stash(WrittenValues).add(name, whole)


def _name_of(context: weakref.ref[RunContext], storage: tuple[int, int], shape: tuple[int, ...]) -> str:
    """Return the FQN of the parameter of a storage, and the shape of another tensor."""
    found = context()
    for fqn, parameter in () if found is None else sharded_parameters(found).items():
        if storage[0] and _storage(parameter) == storage:
            return fqn
    return f"a sharded tensor of shape {list(shape)}"


def sharded_like(like: DTensor, whole: Tensor, *, is_written: bool = False) -> Tensor:
    """Return a whole tensor of the model's order of rows sharded as another one of its shape; see `place_rows`."""
    import torch

    with torch.no_grad():
        shard: Any = torch.empty_like(like, dtype=whole.dtype)
        place_rows(shard, whole, like=like, is_written=is_written)
    return shard


def _order_of(tensor: DTensor, *, draws: bool) -> Order | None:
    """Return the order of a parameter, of which `tensor` may be a view; None for other tensors."""
    storage, alike = _storage(tensor), ""
    for fqn, parameter, order in _ordered():
        if parameter.shape == tensor.shape:
            if _storage(parameter) == storage:
                return order
            alike = "" if draws else fqn
    if alike:
        raise StepError(
            f'a whole tensor is written into one of the shape of "{alike}", whose rows are sharded in another order '
            "than the model's, and which tensor it is cannot be seen: write into the parameter itself"
        )
    return None


def _ordered() -> Iterator[tuple[str, DTensor, Order]]:
    from torch.distributed.tensor import DTensor

    for context in tuple(_CONTEXTS):
        orders = context.stash(StoredOrders).by_name
        for fqn, parameter in context.named_parameters():
            if fqn in orders and isinstance(parameter, DTensor):
                yield fqn, parameter, orders[fqn]
        for fqn, reference in _COPIES.get(context, ()):
            copied = reference()
            if isinstance(copied, DTensor):
                yield fqn, copied, orders[fqn]


def _storage(tensor: DTensor) -> tuple[int, int]:
    local = tensor.to_local()
    return local.data_ptr(), local.numel()
