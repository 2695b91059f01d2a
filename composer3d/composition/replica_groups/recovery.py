"""The state of a group that comes back, from the memory of one that trains: no disk, and nothing pickled.

Ranks of one place hold the same shards in every group, so each gives its own: JSON that says which tensors there are,
then their local shards, one after another.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from composer3d.errors import ReplicaError
from composer3d.step.gradients import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.composition.run_state.persistence import Persistence
    from composer3d.replicas import Exchange

__all__ = ["give_state", "take_state"]

_LONGEST = 1 << 30  # bytes of JSON


def give_state(
    persistence: Persistence, optimizer: torch.optim.Optimizer | None, exchange: Exchange, place: int
) -> None:
    """Send parameters, optimizer, plugins and what was attached to the rank of a place in the exchange.

    Args:
        persistence: Of this group's state.
        optimizer: Of the loop.
        exchange: With the other groups.
        place: Of who takes it, among the members.

    Raises:
        ExchangeError: A group is gone.

    Memory: one tensor on the CPU. Collectives: those of describing the optimizer's state, over the group.
    """
    import torch

    with persistence.readable(optimizer) as (tensors, state):
        described = {key: [list(each.shape), str(each.dtype)] for key, each in tensors.items()}
        text = json.dumps({"state": state, "tensors": described}).encode()
        exchange.send(torch.tensor([len(text)]), place)
        exchange.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), place)
        for each in tensors.values():
            if local(each).numel():
                exchange.send(_plain(local(each)), place)


def take_state(
    persistence: Persistence, optimizer: torch.optim.Optimizer | None, exchange: Exchange, place: int
) -> None:
    """Receive what `give_state` sends, into the tensors and states that are there.

    Args:
        persistence: Of this group's state.
        optimizer: Of the loop.
        exchange: With the other groups.
        place: Of who gives it, among the members.

    Raises:
        ExchangeError: A group is gone.
        ReplicaError: What comes is no state of this run.
    """
    import torch

    from composer3d.checkpoint import TensorInfo

    length = torch.zeros(1, dtype=torch.int64)
    exchange.receive(length, place)
    if not 0 < int(length) < _LONGEST:
        raise ReplicaError("the group that gives its state sends none")
    text = torch.empty(int(length), dtype=torch.uint8)
    exchange.receive(text, place)
    told: dict[str, Any] = json.loads(bytes(text.tolist()))

    def read(tensors: dict[str, Tensor]) -> None:
        """Fill this group's tensors in the order in which they come."""
        if tensors.keys() != told["tensors"].keys():
            other = sorted(tensors.keys() ^ told["tensors"].keys())[0]
            raise ReplicaError(f'the group that gives its state and this one differ by "{other}"')
        with torch.no_grad():
            for key, (shape, dtype) in told["tensors"].items():
                if [list(tensors[key].shape), str(tensors[key].dtype)] != [shape, dtype]:
                    raise ReplicaError(f'"{key}" is another tensor in the group that gives its state')
                own = local(tensors[key])
                if not own.numel():
                    continue
                received = _receivable(own)
                exchange.receive(received.view(torch.uint8) if received.dim() else received, place)
                if received.data_ptr() != own.data_ptr():
                    own.copy_(received)

    known = {
        key: TensorInfo(shape=tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
        for key, (shape, dtype) in told["tensors"].items()
    }
    persistence.fill(optimizer, told["state"], known, read)


def _receivable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor on the CPU for what comes: the one that it is for, where that is such a one."""
    import torch

    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)


def _plain(tensor: Tensor) -> Tensor:
    """Return a shard as bytes on the CPU: gloo does not send every dtype."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    return plain.view(torch.uint8) if plain.dim() else plain
