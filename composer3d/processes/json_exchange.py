"""Small Python values exchanged between ranks as JSON text in tensors, so that nothing is unpickled on arrival.

torch's own collectives of objects pickle: whoever can write to a rank's connection runs code there. JSON carries
strings, numbers, bools, None, lists and dicts with string keys; tuples arrive as lists. On a fake process group, whose
other ranks do not exist, no collective is called, and every rank appears to have this rank's value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = [
    "Json",
    "all_gather_json",
    "broadcast_json",
    "gather_json",
    "receive_json",
    "require_json",
    "scatter_json",
    "send_json",
]

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
_SCALARS = (str, int, float, bool, type(None))


def all_gather_json(value: Json, *, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in the order of the group's ranks.

    Args:
        value: What JSON carries without loss; tuples arrive as lists.
        group: Its ranks take part, and all of them call this; None is the world, or this process where there is none.

    Raises:
        TypeError: A value that JSON does not carry, with the keys that lead to it.

    Memory: the longest text, once for each rank. Collectives: two all-gathers, of lengths and of texts; none on a fake
    process group or without one.
    """
    import torch
    import torch.distributed as dist

    text = _encoded(value)
    if not _has_peers(group):
        return [json.loads(text) for _ in range(_size(group))]
    own, lengths = _padded(text, group)
    texts = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(texts, own, group=group)
    return [_decoded(*pair) for pair in zip(texts, lengths, strict=True)]


def gather_json(value: Json, *, group: ProcessGroup | None = None) -> list[Any] | None:
    """Return every rank's value on the group's first rank, and None on the others.

    For what one rank alone needs of all: arguments and errors are those of `all_gather_json`.

    Memory: on the first rank the longest text, once for each rank; elsewhere once. Collectives: an all-gather of
    lengths and a gather of texts; none on a fake process group or without one.
    """
    import torch
    import torch.distributed as dist

    text = _encoded(value)
    if not _has_peers(group):
        return [json.loads(text) for _ in range(_size(group))]
    own, lengths = _padded(text, group)
    if dist.get_rank(group) != 0:
        dist.gather(own, group_dst=0, group=group)
        return None
    texts = [torch.empty_like(own) for _ in lengths]
    dist.gather(own, texts, group_dst=0, group=group)
    return [_decoded(*pair) for pair in zip(texts, lengths, strict=True)]


def broadcast_json(value: Json, *, group: ProcessGroup | None = None) -> Any:
    """Return the value of the group's first rank, on all of its ranks.

    Args:
        value: Of the first rank; what other ranks give is not looked at, but on a fake process group, where it is the
            answer.
        group: Its ranks take part, and all of them call this; None is the world, or this process where there is none.

    Raises:
        TypeError: A value that JSON does not carry, with the keys that lead to it.

    Memory: the text. Collectives: two broadcasts, of the length and of the text; none on a fake process group or
    without one.
    """
    import torch
    import torch.distributed as dist

    if not _has_peers(group):
        return json.loads(_encoded(value))
    device = _device(group)
    own = _tensor(_encoded(value) if dist.get_rank(group) == 0 else b"", device)
    length = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, group_src=0, group=group)
    text = own if dist.get_rank(group) == 0 else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=0, group=group)
    return _decoded(text, int(length))


def scatter_json(values: Sequence[Json] | None, *, group: ProcessGroup | None = None) -> Any:
    """Return on every rank its own of the values that the group's first rank gives.

    Args:
        values: On the first rank one for each rank, in the order of the group's ranks; elsewhere it is not looked at,
            but on a fake process group, where this rank's is the answer.
        group: Its ranks take part, and all of them call this; None is the world, or this process where there is none.

    Raises:
        TypeError: A value that JSON does not carry, with the keys that lead to it.

    Memory: on the first rank the longest text, once for each rank; elsewhere once. Collectives: a broadcast of lengths
    and a scatter of texts; none on a fake process group or without one.
    """
    import torch
    import torch.distributed as dist

    if not _has_peers(group):
        return json.loads(_encoded((values or [None])[_rank(group)]))
    is_first, device = dist.get_rank(group) == 0, _device(group)
    texts = [_encoded(value) for value in values or ()] if is_first else []
    lengths = torch.tensor([len(text) for text in texts] or [0] * _size(group), dtype=torch.int64, device=device)
    dist.broadcast(lengths, group_src=0, group=group)
    longest = int(lengths.max())
    own = torch.empty(longest, dtype=torch.uint8, device=device)
    padded = [_tensor(text.ljust(longest), device) for text in texts]
    dist.scatter(own, padded if is_first else None, group_src=0, group=group)
    return _decoded(own, int(lengths[dist.get_rank(group)]))


def send_json(value: Json, *, to: int, group: ProcessGroup | None = None) -> None:
    """Send a value to another rank of the group, which calls `receive_json`.

    Args:
        value: What JSON carries without loss; tuples arrive as lists.
        to: Its rank in the group.
        group: Of both; None is the world.

    Raises:
        TypeError: A value that JSON does not carry, with the keys that lead to it.

    Memory: the text. Collectives: two messages, of the length and of the text.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    text, device = _encoded(value), _device(group)
    for message in (torch.tensor([len(text)], dtype=torch.int64, device=device), _tensor(text, device)):
        # In a batch: with NCCL the communicator is then the group's, and not one of each pair of ranks. Of the module
        # where a pipeline bounds how long messages are waited for.
        for work in distributed_c10d.batch_isend_irecv([dist.P2POp(dist.isend, message, group=group, group_peer=to)]):
            work.wait()


def receive_json(*, source: int, group: ProcessGroup | None = None) -> Any:
    """Return a value that another rank of the group gives to `send_json`.

    Args:
        source: Its rank in the group.
        group: Of both; None is the world.

    Memory: the text. Collectives: two messages, of the length and of the text.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    device, length = _device(group), 1
    for dtype in (torch.int64, torch.uint8):
        message = torch.zeros(length, dtype=dtype, device=device)
        for work in distributed_c10d.batch_isend_irecv(
            [dist.P2POp(dist.irecv, message, group=group, group_peer=source)]
        ):
            work.wait()
        length = int(message[0]) if dtype is torch.int64 else length
    return _decoded(message, length)


def _rank(group: ProcessGroup | None) -> int:
    import torch.distributed as dist

    return dist.get_rank(group) if dist.is_initialized() else 0


def _size(group: ProcessGroup | None) -> int:
    import torch.distributed as dist

    return dist.get_world_size(group) if dist.is_initialized() else 1


def _has_peers(group: ProcessGroup | None) -> bool:
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_backend(group) != "fake"


def _device(group: ProcessGroup | None) -> torch.device:
    """Return the CPU where the group works there, so that nothing waits for an accelerator."""
    import torch
    import torch.distributed as dist

    config = str(dist.get_backend_config(group))
    accelerator = torch.accelerator.current_accelerator()
    if "cpu:" in config or config == "gloo" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _padded(text: bytes, group: ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return this rank's text, as long as the longest of the group, and every rank's length."""
    import torch
    import torch.distributed as dist

    device = _device(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    known = [int(each) for each in lengths]
    return _tensor(text.ljust(max(known)), device), known


def _tensor(text: bytes, device: torch.device) -> Tensor:
    import torch

    if not text:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _decoded(text: Tensor, length: int) -> Any:
    return json.loads(text[:length].cpu().numpy().tobytes())


def _encoded(value: Json) -> bytes:
    require_json(value, "value", advice=" between ranks")
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def require_json(value: object, place: str, *, advice: str) -> None:
    """Refuse what JSON would drop, rename, or not carry.

    Args:
        value: Nested mappings, lists and tuples.
        place: What the message calls it.
        advice: End of the message about a value that JSON does not carry.

    Raises:
        TypeError: With the keys that lead to the value or key at fault.
    """
    if type(value) in _SCALARS:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r}, a {type(key).__name__}; JSON keys are strings")
            require_json(inner, f"{place}.{key}", advice=advice)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            require_json(inner, f"{place}.{index}", advice=advice)
    else:
        raise TypeError(f"{place} is a {type(value).__name__}, which JSON cannot carry{advice}")
