"""Writes into views of sharded tensors, and writes that plain tensors take part in.

A view across shards, `p[3]` or `p.narrow(0, 1, 6)`, is a gathered copy: what a loop writes into it would be lost. Such
copies know the tensor and the views they were made by, and a write is repeated on the whole tensor, of which each rank
keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import initialisation, torch_compat
from composer3d.step.sharded_tensors.stored_rows import place_rows, record_write, whole_rows

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["Handler", "compute_by_torch", "compute_view", "compute_write", "is_settled", "remember_views"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_COPIES = torch_compat.weak_tensor_dictionary()


def compute_view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute views as torch does, and remember which are copies: those that are whole along a dim of shards."""
    from torch.distributed.tensor import DTensor

    with torch_compat.torch_handled(operator):
        result = operator(*args, **kwargs)
    base = args[0]
    if not isinstance(base, DTensor):
        return result
    views = [result] if type(result) is DTensor else torch_compat.tree_leaves(result)
    is_copy = bool(_COPIES) and base in _COPIES
    if not is_copy and not any(_is_gathered(base, view) for view in views if isinstance(view, DTensor)):
        return result
    return remember_views(operator, args, kwargs, result)


def remember_views(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Record how copies of a sharded tensor, or of another copy, were made; return them."""
    root, steps = _COPIES.get(args[0], (args[0], ()))
    is_one = not isinstance(result, list | tuple)
    for index, view in enumerate((result,) if is_one else result):

        def viewed(whole: Tensor, index: int = index) -> Tensor:
            found = operator(whole, *args[1:], **kwargs)
            one: Tensor = found if is_one else found[index]
            return one

        _COPIES[view] = root, (*steps, viewed)
    return result


def _is_gathered(base: DTensor, view: DTensor) -> bool:
    """Return whether a dim of the mesh held shards that the view has not; alike on all ranks."""
    for one, other in zip(base.placements, view.placements, strict=True):
        if one is not other and torch_compat.shard_of(one) is not None and torch_compat.shard_of(other) is None:
            return True
    return False


def compute_write(inner: Handler, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator that writes its first argument: on the whole tensor where that is a copy of views.

    So too where plain tensors take part, indices or masks for example, that no other handler knows.
    Memory: the whole tensor. Collectives: those of `full_tensor` of each DTensor.

    Args:
        inner: Computes all other writes.
    """
    import torch
    from torch.distributed.tensor import DTensor

    target = args[0]
    plain = _plain((*args[1:], *kwargs.values()))
    is_copy = isinstance(target, DTensor) and target in _COPIES
    if not is_copy and not (isinstance(target, DTensor) and plain and inner is compute_by_torch):
        return inner(operator, args, kwargs)
    root, steps = _COPIES.get(target, (target, ()))
    with torch.no_grad():
        whole = whole_rows(root)
        view = whole
        for step in steps:
            view = step(view)
        others, named = torch_compat.tree_map(_whole, (args[1:], kwargs))
        operator(view, *others, **named)
        for value in plain:
            record_write(root, value)
        place_rows(root, whole)
        if steps:
            initialisation.place(target, view)
    return target


def is_settled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether every tensor among an operator's arguments is a DTensor of one mesh, and none a copy of views.

    It is so for an optimizer alone: with gradients, constants beside parameters are noted by the handlers.
    """
    import torch
    from torch.distributed.tensor import DTensor

    first = args[0]
    if torch.is_grad_enabled() or type(first) is not DTensor or (_COPIES and first in _COPIES):
        return False
    mesh = first.device_mesh
    for arg in (*args[1:], *kwargs.values()):
        if type(arg) is DTensor:
            if arg.device_mesh is not mesh:
                return False
        elif isinstance(arg, torch.Tensor | list | tuple):
            return False
    return True


def compute_by_torch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave an operator to torch."""
    with torch_compat.torch_handled(operator):
        return operator(*args, **kwargs)


def _plain(args: Sequence[Any]) -> list[Tensor]:
    """Return the plain tensors among arguments, but for those of one number."""
    import torch
    from torch.distributed.tensor import DTensor

    leaves = torch_compat.tree_leaves(list(args))
    return [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.numel() != 1]


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
