"""Parameters with overlapping memory: on one device, an update of one changes the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from composer3d.errors import InitialisationError
from composer3d.torch_compat import is_wrapper_subclass, storage_key

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["refuse_shared_memory", "views_of_parameters"]


def refuse_shared_memory(registered: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Refuse trainable parameters that overlap in memory with each other, or with another reachable tensor.

    Each would get memory of its own, and what reaches one would no longer reach the other.

    Args:
        registered: Parameters and buffers by FQN, tied ones under each name.
        others: Tensors that attributes, containers and closures hold, by how they are reached.

    Raises:
        InitialisationError: Names both.
    """
    for path, fqn in views_of_parameters(registered, others):
        raise InitialisationError(
            f'"{path}" is a view of the parameter "{fqn}", and would be a tensor of its own in a composition: no '
            f'gradient and no update of "{fqn}" would reach it; make the view in forward, or in a property'
        )
    for one, other in _overlapping(registered):
        raise InitialisationError(
            f'the parameters "{one}" and "{other}" are two that share memory, and would have memory of their own in a '
            "composition; make them one parameter, by assigning it: module.weight = other.weight"
        )


def views_of_parameters(registered: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (access path, the parameter's FQN) of each tensor that overlaps in memory with a trainable parameter.

    Args:
        registered: Parameters and buffers by FQN.
        others: Tensors that are none of these, by how they are reached.
    """
    owners = {storage_key(t): (fqn, t) for fqn, t in registered.items() if t.requires_grad and _is_plain(t)}
    for path, tensor in others.items():
        found = owners.get(storage_key(tensor)) if _is_plain(tensor) else None
        if found is not None and _overlap(tensor, found[1]):
            yield path, found[0]


def _overlapping(registered: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    seen: dict[int, list[tuple[str, Tensor]]] = {}
    for fqn, tensor in registered.items():
        if not _is_plain(tensor):
            continue
        neighbours = seen.setdefault(storage_key(tensor), [])
        for other, neighbour in neighbours:
            is_trained = tensor.requires_grad or neighbour.requires_grad
            if neighbour is not tensor and is_trained and _overlap(tensor, neighbour):
                yield other, fqn
        neighbours.append((fqn, tensor))


def _is_plain(tensor: Tensor) -> bool:
    return not is_wrapper_subclass(type(tensor))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    import torch

    (start, stop), (begin, end) = _span(one), _span(other)
    if max(start, begin) >= min(stop, end):
        return False
    if (one.is_contiguous() and other.is_contiguous()) or one.element_size() != other.element_size():
        return True
    mark = torch.zeros(max(stop, end) // one.element_size(), dtype=torch.bool, device="cpu")
    mark.as_strided(_distinct(one), one.stride(), one.storage_offset()).fill_(True)
    return bool(mark.as_strided(_distinct(other), other.stride(), other.storage_offset()).any())


def _distinct(tensor: Tensor) -> list[int]:
    """Return the sizes without expanded dims: every element once."""
    return [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size() if tensor.numel() else 0
