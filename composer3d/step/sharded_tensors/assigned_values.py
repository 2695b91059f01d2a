"""Values that a loop assigns to sharded parameters and gradients: `p.data = tensor`, as on one device.

A plain tensor is taken for the whole, on all ranks, and each keeps its shard of it. What the loop kept of `p.data`
before, to put it back later, keeps the values that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.observation.call_sites import caller
from composer3d.step.evaluation import reshard_units
from composer3d.step.sharded_tensors.run_meshes import owners_of, owns, sharded_parameters
from composer3d.step.sharded_tensors.stored_rows import record_write, sharded_like

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from composer3d.context import RunContext

__all__ = [
    "assign_values",
    "forget_aliases",
    "num_alias_writes",
    "record_alias",
    "record_gathered",
    "refuse_late_writes",
]

_MOST_ALIASES = 16  # of a parameter, between two steps
# What loops were given for `p.data`, by parameter, each with its version then; gone with the parameter.
_ALIASES = torch_compat.weak_tensor_dictionary()
_ASSIGNED: weakref.WeakKeyDictionary[RunContext, _Assigned] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A plain tensor that was assigned, of which a parameter has shards, while it would have its memory on one device.

    Args:
        tensor: It, or what it is a view of.
        version: What it was written by then.
        own_version: What the parameter was written by then.
        place: Line of the loop.
    """

    tensor: weakref.ref[Tensor]
    version: int
    own_version: int
    place: str


@dataclass(frozen=True, kw_only=True)
class _Assigned:
    """A run's sharded parameters by identity, with their units, and values assigned to them.

    Args:
        units: None for parameters that no unit has.
        sources: The last one of each.
    """

    units: dict[int, torch_compat.UnitShard | None]
    sources: dict[int, _Source] = field(default_factory=dict)


def assign_values(tensor: DTensor, value: Any) -> bool:
    """Let a run's DTensor have the values of a tensor that is assigned to its `.data`; see `torch_compat.assign_data`.

    Args:
        tensor: Parameter, gradient, or what was made of one.
        value: Whole, or sharded in any way over the same mesh.

    Returns:
        Whether the tensor is a run's.

    Raises:
        StepError: The value has another shape or dtype.

    Memory: a shard, where the value is not sharded alike. Collectives: those of `redistribute` then.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not owns((tensor,)):
        return False
    _refuse_unfit(tensor, value)
    found = next(((c, a) for c in owners_of(tensor.device_mesh) if id(tensor) in (a := _assigned(c)).units), None)
    with torch.no_grad():
        shard = _sharded(tensor, value)
    if found is None:
        torch_compat.take_local(tensor, shard)
    else:
        context, assigned = found
        unit = assigned.units[id(tensor)]
        if unit is not None and unit.is_gathered:
            reshard_units(context.parts)
        own = shard if any(shard is p for p in sharded_parameters(context).values()) else None
        torch_compat.take_local(tensor, shard.detach() if own is not None else shard, unit)
        _remember(assigned, tensor, value if shard is not value else None)
    if _is_plain(value):
        record_write(tensor, value.detach())
    return True


def refuse_late_writes(context: RunContext) -> None:
    """Refuse to go on after writes into plain tensors that were assigned to `.data`: parameters do not see them.

    Raises:
        StepError: With the line that assigned.
    """
    for source in _ASSIGNED[context].sources.values() if context in _ASSIGNED else ():
        tensor = source.tensor()
        if tensor is not None and tensor._version != source.version:
            raise StepError(
                f"{source.place}the tensor that p.data = tensor was given was written into afterwards, which p, of "
                "which each rank holds a shard, does not see; assign it after the last write, or write "
                "p.data = tensor.clone()"
            )


def record_alias(tensor: Any, alias: Any) -> None:
    """Remember what is returned for a parameter's `.data`: a write into it moves no version but its own."""
    from torch import nn

    if isinstance(tensor, nn.Parameter):
        aliases = _ALIASES.setdefault(tensor, [])
        aliases[:-_MOST_ALIASES] = []
        aliases.append((alias, alias._version))


def num_alias_writes(parameter: Any) -> int:
    """Return how many operators have written into what a loop was given for a parameter's `.data`.

    Alike on all ranks that run the same lines, whatever they changed in a rank's shard.
    """
    return sum(alias._version - before for alias, before in _ALIASES.get(parameter, ()))


def forget_aliases(parameters: Iterable[Any]) -> None:
    """Count from here on."""
    for parameter in parameters:
        _ALIASES.pop(parameter, None)


def record_gathered(fqn: str, parameter: DTensor, whole: Tensor) -> None:
    """Record a write into a gathered parameter, before its shard is updated.

    Args:
        fqn: Of the parameter.
        parameter: Sharded.
        whole: The local tensor that was gathered.

    Raises:
        StepError: It is of another dtype, or shape, than the parameter.
    """
    local = parameter.to_local()
    if whole.dtype != local.dtype or whole.dim() != local.dim():
        raise StepError(
            f'"{fqn}" was written into while a forward had it gathered as {whole.dtype} of shape {list(whole.shape)}, '
            f"and is stored as {local.dtype}; write into parameters before the forward, or after its backward"
        )
    if whole.shape == parameter.shape:
        record_write(parameter, whole)


def _assigned(context: RunContext) -> _Assigned:
    if context not in _ASSIGNED:
        units: dict[int, torch_compat.UnitShard | None] = dict.fromkeys(map(id, sharded_parameters(context).values()))
        for part in context.parts:
            units |= torch_compat.unit_shards(part.module)
        _ASSIGNED[context] = _Assigned(units=units)
    return _ASSIGNED[context]


def _remember(assigned: _Assigned, tensor: DTensor, value: Tensor | None) -> None:
    """Record an assigned tensor, unless it is a view of the parameter.

    Raises:
        StepError: It was assigned before: on one device the parameter is that tensor, and training has changed it.
    """
    earlier = assigned.sources.pop(id(tensor), None)
    base = None if value is None else value if value._base is None else value._base
    if base is None:
        return
    _, place = caller(())
    place = f"{place}: " if place else ""
    if earlier is not None and earlier.tensor() is base and earlier.own_version != tensor._version:
        raise StepError(
            f"{place}p.data = tensor was written before with the same tensor, which on one device is p since, with all "
            "that training has made of it; write p.data = tensor.clone()"
        )
    if not base.is_inference():
        assigned.sources[id(tensor)] = _Source(
            tensor=weakref.ref(base), version=base._version, own_version=tensor._version, place=place
        )


def _is_plain(value: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return not isinstance(value, DTensor)


def _sharded(tensor: DTensor, value: Any) -> Any:
    """Return a value as a DTensor of the placements of another: itself, if it has these."""
    if _is_plain(value) or value.device_mesh != tensor.device_mesh:
        whole = value.detach() if _is_plain(value) else value.detach().full_tensor()
        return sharded_like(tensor, whole.to(tensor.to_local().device), is_written=True)
    return value if value.placements == tensor.placements else value.redistribute(placements=tensor.placements)


def _refuse_unfit(tensor: DTensor, value: Tensor) -> None:
    import torch

    said, advice = "", "change the model before compose"
    if tensor.shape != value.shape:
        said = f"of shape {list(value.shape)}, and the sharded p has {list(tensor.shape)}"
    elif tensor.dtype != value.dtype:
        said, advice = f"of {value.dtype}, and the sharded p is of {tensor.dtype}", "write p.data = tensor.to(p.dtype)"
    elif type(tensor.to_local()) is not torch.Tensor:
        said, advice = f"to a p whose shards are stored as {type(tensor.to_local()).__name__}", "write p.copy_(tensor)"
    if said:
        _, place = caller(())
        raise StepError(f"{f'{place}: ' if place else ''}p.data = tensor {said}; {advice}")
