"""Operators that a loop applies to sharded parameters and gradients, where torch has no rule for their shards.

A DTensor stands for the whole tensor, so what cannot be computed on shards is computed on whole tensors: norms of a
renormalisation, a median, writes by indices, plain tensors copied into parameters. Not those of which the whole result
would be lost, or a rank's data taken for the whole: these are refused with the line of the loop.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.observation.call_sites import caller
from composer3d.step.sharded_tensors.assigned_values import assign_values, record_alias
from composer3d.step.sharded_tensors.run_meshes import forget_meshes, know_meshes, owns, raise_explained
from composer3d.step.sharded_tensors.stored_rows import know_orders, place_rows, record_write, sharded_like
from composer3d.step.sharded_tensors.whole_constants import are_whole_constants, record_constants, record_sharded
from composer3d.step.sharded_tensors.whole_draws import draw_whole
from composer3d.step.sharded_tensors.written_views import (
    Handler,
    compute_by_torch,
    compute_view,
    compute_write,
    is_settled,
    remember_views,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from composer3d.context import RunContext

__all__ = ["OWN_SCALER", "compute_whole_operators"]

log = logging.getLogger(__name__)
_REPORTED: set[str] = set()
OWN_SCALER = (
    "a GradScaler of the loop's own would skip the step only on ranks whose shards overflow: leave it out, "
    "and name a plugin of [precision] with param_dtype = float16, whose scale all ranks agree on"
)
_ADVICE = (
    "write whole = p.full_tensor() on all ranks, compute with that, and p.copy_(whole) under torch.no_grad() for what "
    "is to be kept"
)


def compute_whole_operators(context: RunContext) -> Callable[[], None]:
    """Let operators on DTensors that torch cannot compute on shards work, or be refused with what to write.

    Those over meshes of runs that are open; other DTensors of the process are torch's.

    Args:
        context: Has the order of rows of its parameters.

    Returns:
        A function that ends it for this run.
    """
    know_orders(context)
    know_meshes(context)
    handlers = _handlers()
    settled = dict.fromkeys(torch_compat.mixable_operators().elementwise, is_settled)
    for operator in torch_compat.writing_operators():
        settled |= {} if operator in handlers else {operator: is_settled}
        handlers[operator] = functools.partial(compute_write, handlers.get(operator, compute_by_torch))
    torch_compat.handle_operators(
        handlers,
        uncovered=_compute_whole,
        mixed=_refuse_mixed,
        owns=owns,
        settled=settled,
    )
    torch_compat.assign_data(assign_values, record_alias)
    return functools.partial(forget_meshes, context)


def _handlers() -> dict[Any, Handler]:
    mixable = torch_compat.mixable_operators()
    return {
        **dict.fromkeys(torch_compat.viewing_operators(), compute_view),
        **dict.fromkeys(torch_compat.drawing_operators(), draw_whole),
        **dict.fromkeys(mixable.elementwise, _compute_mixed),
        **dict.fromkeys(mixable.lists, _compute_lists),
        mixable.copies: _copy_lists,
        **dict.fromkeys(mixable.of_data, _compute_of_data),
        **dict.fromkeys(mixable.reading, _compute_read),
        **dict.fromkeys(mixable.extremes, _compute_extreme),
        mixable.stack: _compute_stack,
        mixable.number: _compute_number,
    }


def _refuse_mixed(operator: Any, advice: str = _ADVICE) -> NoReturn:
    if operator.name() == torch_compat.UNSCALING:
        raise StepError(OWN_SCALER)
    raise StepError(
        f"{_place()}{operator.name()} is given a sharded tensor, which stands for the whole one, and a plain tensor, "
        f"of which it is not known whether it is a rank's data; {advice}"
    )


def _compute_of_data(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave an operator to torch, unless it is given plain tensors and DTensors: products of weights and data."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if any(isinstance(t, DTensor) for t in tensors) and any(not isinstance(t, DTensor) and t.dim() for t in tensors):
        _refuse_mixed(operator)
    return _by_torch(operator, args, kwargs)


def _compute_read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read whole tensors by plain indices, or join them with plain ones or over two meshes, without a gradient."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = [x for x in torch_compat.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
    if len({x.device_mesh if isinstance(x, DTensor) else None for x in tensors}) < 2:
        return _by_torch(operator, args, kwargs)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        _refuse_mixed(operator, "write it under torch.no_grad(), where it is computed on whole tensors, on all ranks")
    if operator.name() == "aten::cat":  # a vector of all parameters, with which plain ones are written
        return operator(*torch_compat.tree_map(_whole, args), **kwargs)
    return _compute_whole(operator, args, kwargs)


def _place() -> str:
    return f"{place}: " if (place := caller(())[1]) else ""


# ---- without a rule --------------------------------------------------------------------------------------------------


def _compute_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator on whole tensors, and shard its result like the first DTensor of that shape.

    Memory: the whole tensors. Collectives: those of `full_tensor` of each.
    """
    from torch.distributed.tensor import DTensor

    leaves = [leaf for leaf in torch_compat.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    writes = torch_compat.is_in_place(operator)
    if torch_compat.is_view(operator) and not writes and isinstance(args[0], DTensor):
        views = torch_compat.tree_map(_whole, (args, kwargs))
        result = torch_compat.tree_map(lambda view: _replicated(view, leaves[0]), operator(*views[0], **views[1]))
        return remember_views(operator, args, kwargs, result)
    if torch_compat.is_view(operator) or (writes and not _writes_first(operator)):
        raise StepError(
            f"{_place()}{operator.name()} would return a view, or write into a tensor, across the shards of several "
            f"ranks; {_ADVICE}"
        )
    _report(operator)
    whole_args, whole_kwargs = torch_compat.tree_map(_whole, (args, kwargs))
    result = operator(*whole_args, **whole_kwargs)
    if writes:
        place_rows(args[0], result)
        return args[0]
    # Over the mesh of a gathered parameter, if one takes part: its gradient is of that mesh.
    likes = sorted(leaves, key=lambda leaf: leaf.device_mesh.ndim)
    return torch_compat.tree_map(lambda value: _as_sharded(value, likes), result)


def _writes_first(operator: Any) -> bool:
    arguments = operator._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return written == arguments[:1] and str(arguments[0].type) == "Tensor"


def _report(operator: Any) -> None:
    if operator.name() not in _REPORTED:
        _REPORTED.add(operator.name())
        log.warning(
            "%s%s of sharded tensors is computed on whole ones, gathered on each rank", _place(), operator.name()
        )


def _whole(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _as_sharded(value: Any, likes: Sequence[DTensor]) -> Any:
    """Return a whole tensor sharded as one of the same shape, else replicated."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    for like in likes:
        if like.shape == value.shape and not any(p.is_partial() for p in like.placements):
            return sharded_like(like, value)
    return _replicated(value, likes[0])


def _replicated(whole: Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


# ---- plain tensors and DTensors --------------------------------------------------------------------------------------


def _compute_mixed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an elementwise operator of operands of which some are plain tensors, or sharded over another mesh."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if len(sharded) == len(tensors) and len({tensor.device_mesh for tensor in sharded}) == 1:
        if len(tensors) > 1 and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            record_sharded(_place, tensors)
        return _by_torch(operator, args, kwargs)
    writes = torch_compat.is_in_place(operator)
    target = args[0] if writes else min((t for t in sharded if t.dim()), key=lambda t: t.device_mesh.ndim, default=None)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        if _is_torchs(operator, tensors, sharded):
            return _by_torch(operator, args, kwargs)
        if not any(tensor.requires_grad for tensor in sharded):
            if isinstance(target, DTensor) and writes:
                _refuse_mixed(operator)
            target = None  # constants, of which a rank's data meets the whole
            record_constants(_place, tensors)
        elif any(t.dim() for t in tensors) and _has_gradient_of_data(tensors, target):
            _refuse_mixed(operator)
    elif not writes and are_whole_constants(tensors):
        target = None
    if not isinstance(target, DTensor):  # a plain tensor is written, or numbers of shards, such as norms, are read
        return operator(*map(_whole, args), **kwargs)
    fits = target if writes else _summed(target)
    fitting = [fits if arg is target else _fitting(arg, fits, operator) for arg in args]
    return _by_torch(operator, tuple(fitting), kwargs)


def _is_torchs(operator: Any, tensors: Sequence[Tensor], sharded: Sequence[DTensor]) -> bool:
    """Return whether operands with gradients are left to torch: all but sums of numbers, and plain tensors of a shape.

    A sum of a loss and a penalty has the gradients of each. Plain tensors without a gradient are taken for the whole.
    """
    from torch.distributed.tensor import DTensor

    if not any(tensor.dim() for tensor in tensors):
        return not _adds_numbers(operator, tensors)
    has_gradients = any(tensor.requires_grad for tensor in sharded)
    if has_gradients and len({tensor.device_mesh for tensor in sharded}) > 1:
        return True
    return all(isinstance(tensor, DTensor) or tensor.numel() == 1 for tensor in tensors)


def _has_gradient_of_data(tensors: Sequence[Tensor], target: Any) -> bool:
    """Return whether a plain tensor is written, or has a gradient, which is a rank's alone."""
    from torch.distributed.tensor import DTensor

    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return any(tensor is target for tensor in plain) or any(tensor.requires_grad for tensor in plain)


def _summed(tensor: DTensor) -> DTensor:
    """Return a tensor whose ranks hold parts of a reduction with these reduced, and others as they are."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    result: DTensor = tensor.redistribute(placements=placements)
    return result


def _adds_numbers(operator: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether numbers are added up: the gradients of a product would be one rank's.

    Raises:
        StepError: A number of a rank's data is multiplied with one of sharded parameters, and both have gradients.
    """
    if operator.name() in ("aten::add.Tensor", "aten::sub.Tensor"):
        return True
    if all(tensor.requires_grad for tensor in tensors):
        raise StepError(
            f"{_place()}a loss of this rank's data is multiplied with a number of the composed model's parameters, "
            "whose gradient is then this rank's alone; compute it in the model's forward"
        )
    return False


def _compute_number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number in a tensor of one, which torch takes for whole where it is a shard's sum, norm or extreme.

    Collectives: those of `full_tensor`, unless it is whole.
    """
    if all(placement.is_replicate() for placement in args[0].placements):
        return _by_torch(operator, args, kwargs)
    return operator(_whole(args[0]), **kwargs)


def _compute_extreme(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an extreme on the whole tensor where some rank's shard is empty: it alone would raise."""
    tensor, dims = args[0], args[0].shape
    if operator.name() == "aten::linalg_vector_norm" and abs(args[1] if len(args) > 1 else 2) != math.inf:
        return _by_torch(operator, args, kwargs)
    pairs = zip(tensor.device_mesh.shape, map(torch_compat.shard_of, tensor.placements), strict=True)
    if all(shard is None or (n - 1) * -(-dims[shard.dim] // n) < dims[shard.dim] for n, shard in pairs):
        return _by_torch(operator, args, kwargs)
    return _compute_whole(operator, args, kwargs)


def _compute_stack(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack numbers, norms for example, of which some are plain and others of sharded tensors, as plain ones."""
    from torch.distributed.tensor import DTensor

    kinds = {t.device_mesh if isinstance(t, DTensor) else None for t in args[0]}
    if len(kinds) == 1 or any(tensor.dim() for tensor in args[0]):
        return _by_torch(operator, args, kwargs)
    return operator([_whole(tensor) for tensor in args[0]], *args[1:], **kwargs)


def _fitting(value: Any, target: DTensor, operator: Any) -> Any:
    """Return a whole tensor sharded as a target of its shape."""
    import torch
    from torch.distributed.tensor import DTensor

    if not isinstance(value, torch.Tensor) or (isinstance(value, DTensor) and value.device_mesh == target.device_mesh):
        return value
    whole = _whole(value)
    if not whole.dim():
        return whole
    if whole.shape != target.shape:
        try:
            whole = whole.expand(target.shape)
        except RuntimeError:
            raise StepError(
                f"{_place()}{operator.name()} is given a tensor of shape {list(whole.shape)} and a sharded one, whose "
                f"whole shape is {list(target.shape)}; a plain tensor beside it is taken for the whole, on all ranks"
            ) from None
    if not isinstance(value, DTensor):
        record_write(target, whole)
    return sharded_like(target, whole)


def _by_torch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch_compat.torch_handled(operator):
        try:
            return operator(*args, **kwargs)
        except RuntimeError as error:
            raise_explained(error, f"{_place()}{operator.name()} of a sharded tensor")
            raise


# ---- lists -----------------------------------------------------------------------------------------------------------


def _compute_lists(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator of a list by groups, of plain tensors and of the DTensors of each mesh and placement.

    Norms of several groups are returned as plain numbers of whole tensors, since what combines them takes one kind.
    Collectives: for norms, those of one `full_tensor` a group.
    """
    import torch
    from torch.distributed.tensor import DTensor

    tensors = args[0]
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        groups.setdefault(kind, []).append(index)
    if len({None if kind is None else kind[0] for kind in groups}) == 1:
        return _by_torch(operator, args, kwargs)
    results: list[Any] = [None] * len(tensors)
    for indices in groups.values():
        # A factor that was computed from plain norms is plain, which suits all groups.
        own = [[each[i] for i in indices] if isinstance(each, list | tuple) else _whole(each) for each in args[1:]]
        found = _by_torch(operator, ([tensors[index] for index in indices], *own), kwargs)
        for index, value in zip(indices, _whole_numbers(found), strict=True) if found is not None else ():
            results[index] = value
    if torch_compat.is_in_place(operator):
        return None
    return [torch.empty(()) if value is None else value for value in results]


def _copy_lists(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copy tensors into others one by one; torch has no rule for lists of them."""
    for target, source in zip(*args, strict=True):
        target.copy_(source, **kwargs)


def _whole_numbers(values: Sequence[Tensor]) -> Sequence[Tensor]:
    import torch
    from torch.distributed.tensor import DTensor

    if not values or not isinstance(values[0], DTensor):
        return values
    combine: Callable[..., Any] = torch.stack
    return tuple(_whole(combine(list(values))).unbind())
