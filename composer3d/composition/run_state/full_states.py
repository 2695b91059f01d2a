"""State of the whole model on one rank, those parameters among it that other ranks alone hold, as experts of lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d.processes import all_gather_json
from composer3d.step.evaluation import reshard_units

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["full", "full_state_of"]


def full_state_of(context: RunContext, group: Any) -> dict[str, Tensor]:
    """Return the whole model's tensors on the CPU of the first rank; see `Composition.full_state_dict`.

    Args:
        context: Of a composition of one part.
        group: Ranks of one global batch; None for the world.
    """
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    reshard_units(context.parts)
    own = context.parts[0].module.state_dict()
    senders = _senders(context, own, group)
    result = {}
    for fqn in _in_order(context, own, senders):
        found = full(own[fqn]) if fqn in own else None
        if fqn in senders:
            found = _sent(found, senders[fqn], context, group)
        if found is None:
            continue
        whole = context.in_model_order(fqn, found).cpu()
        if context.rank == 0:
            result[fqn] = whole.clone() if whole is own.get(fqn) else whole
    return result


def full(tensor: Tensor) -> Tensor:
    """Return a tensor whole. Collectives: an all-gather of one that is sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _senders(context: RunContext, own: Mapping[str, Tensor], group: Any) -> dict[str, tuple[int, list[int], str]]:
    """Return, of each parameter that the first rank does not hold, who sends it, its shape and its dtype."""
    lacking = [fqn for fqn in context.parameter_fqns if fqn not in own] if context.rank == 0 else []
    wanted = all_gather_json(lacking, group=group)[0]
    if not wanted:
        return {}
    held: Any = {
        fqn: [list(own[fqn].shape), str(own[fqn].dtype).removeprefix("torch.")] for fqn in wanted if fqn in own
    }
    found: dict[str, tuple[int, list[int], str]] = {}
    for rank, forms in enumerate(all_gather_json(held, group=group)):
        for fqn, (shape, dtype) in forms.items():
            found.setdefault(fqn, (rank, shape, dtype))
    return found


def _in_order(context: RunContext, own: Mapping[str, Tensor], senders: Mapping[str, Any]) -> Iterator[str]:
    """Yield all names, in the order that all ranks share: those of others stand where the model has them."""
    place = {fqn: at for at, fqn in enumerate(context.parameter_fqns)}
    others = sorted((fqn for fqn in senders if fqn not in own), key=place.__getitem__, reverse=True)
    for fqn in own:
        while others and place[others[-1]] < place.get(fqn, -1):
            yield others.pop()
        yield fqn
    yield from reversed(others)


def _sent(whole: Tensor | None, sender: tuple[int, list[int], str], context: RunContext, group: Any) -> Tensor | None:
    """Send a whole tensor to the first rank. Collectives: one message, of the whole tensor."""
    import torch
    import torch.distributed as dist

    rank, shape, dtype = sender
    if context.rank == 0:
        whole = torch.empty(shape, dtype=getattr(torch, dtype), device=context.device)
        dist.recv(whole, src=dist.get_global_rank(group, rank), group=group)
    elif whole is not None and dist.get_rank(group) == rank:
        dist.send(whole.to(context.device).contiguous(), dst=dist.get_global_rank(group, 0), group=group)
    return whole
