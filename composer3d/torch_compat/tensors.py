"""Tensors: their storages, trees of them, operators on many."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from composer3d.torch_compat.modes import without_torch_functions

__all__ = [
    "allocate",
    "dump_memory_history",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "gradient_hooks",
    "has_argument",
    "is_wrapper_subclass",
    "neg_view",
    "node_shape",
    "num_flops",
    "orthogonalised",
    "plain_tensors",
    "record_memory_history",
    "scaled_product",
    "set_gradient_hooks",
    "storage_key",
    "take_memory",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unviewed",
    "weak_tensor_dictionary",
    "with_attributes_of",
    "written_tensors",
]


_WRAPPERS: dict[type, bool] = {}  # asked for every operator


def is_wrapper_subclass(cls: type) -> bool:
    """Return whether a tensor class wraps tensors and dispatches again: DTensor, AsyncCollectiveTensor, float8."""
    known = _WRAPPERS.get(cls)
    if known is None:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

        known = _WRAPPERS[cls] = is_traceable_wrapper_subclass_type(cls)
    return known


def plain_tensors(tensor: Any) -> list[Any]:
    """Return the plain tensors that a tensor consists of: itself, or what a wrapper holds at any depth.

    What wrappers name may be other things too: DTensor's mesh is one (torch 2.13).
    """
    import torch

    if not is_wrapper_subclass(type(tensor)):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [plain for each in inner if isinstance(each, torch.Tensor) for plain in plain_tensors(each)]


def storage_key(tensor: Any) -> int:
    """Return what identifies a tensor's memory while it lives, on meta too, where every data pointer is 0."""
    return int(tensor.untyped_storage()._cdata)


def written_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, as its schema says; schemas have no public home."""
    written: list[Any] = []
    for index, name in _written_arguments(operator):
        value = args[index] if index < len(args) else kwargs.get(name)
        written += [leaf for leaf in tree_leaves(value) if leaf is not None]
    return written


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that an operator writes to: schemas are read anew at each access."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


# What no tree consists of: most arguments of operators are of these types, and of tensors.
_LEAVES = frozenset({int, float, bool, str, type(None)})


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dicts; torch's pytree has no public home.

    Operators are called with few kinds of values, of which torch finds out in five times as long what they are.
    """
    import torch

    return _map(function, tree, torch.Tensor)


def _map(function: Callable[[Any], Any], tree: Any, tensor: type) -> Any:
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, tensor):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([_map(function, each, tensor) for each in tree])
    if kind is dict:
        return {key: _map(function, each, tensor) for key, each in tree.items()}
    from torch.utils._pytree import tree_map as map_any

    return map_any(function, _known(tree))


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and dicts; see `tree_map`."""
    import torch

    found: list[Any] = []
    _add_leaves(tree, found, torch.Tensor)
    return found


def _add_leaves(tree: Any, found: list[Any], tensor: type) -> None:
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for each in tree:
            _add_leaves(each, found, tensor)
    elif kind is dict:
        for each in tree.values():
            _add_leaves(each, found, tensor)
    else:
        from torch.utils._pytree import tree_leaves as leaves_of_any

        found += leaves_of_any(_known(tree))


def _known(tree: Any) -> Any:
    """Return a tree, once torch knows how to take the dataclasses of a model's in it apart; FSDP2 asks torch, too.

    Those with fields that their arguments do not set could not be made again, and stay leaves.
    """
    import torch
    from torch.utils._pytree import tree_leaves as leaves_of_any

    for leaf in leaves_of_any(tree):
        kind = type(leaf)
        if not dataclasses.is_dataclass(kind) or kind.__module__.startswith(("composer3d", "torch.")):
            continue
        if all(field.init for field in dataclasses.fields(kind)):
            torch.export.register_dataclass(kind)
            return _known(tree)
    return tree


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested tuples, lists and dicts, and their form; torch's pytree has no public home."""
    from torch.utils._pytree import tree_flatten

    return tree_flatten(_known(tree))


def tree_unflatten(leaves: Any, form: Any) -> Any:
    """Return nested tuples, lists and dicts of a form; torch's pytree has no public home."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, form)


def neg_view(tensor: Any) -> Any:
    """Return a tensor that is read negated; torch makes such views for imaginary parts, and names it privately."""
    import torch

    return torch._neg_view(tensor)


def allocate(module: Any, device: Any) -> None:
    """Give a module's tensors on meta memory on a device, and move the others there with their values.

    `Module.to_empty` would empty those too, and `Module._apply`, which FSDP2 overrides to follow, is not public. Plain
    tensors stay the objects that they are, so that lists and closures that hold them hold what the module holds.
    """
    import gc
    import warnings

    import torch

    def on_meta() -> list[Any]:
        owned = (t for owner in module.modules() for t in (*owner._parameters.values(), *owner._buffers.values()))
        return [t for t in owned if t is not None and t.is_meta and not is_wrapper_subclass(type(t))]

    for tensor in on_meta():
        take_memory(tensor, torch.empty_like(tensor.detach(), device=device))
    left = on_meta()
    if left:
        gc.collect()  # graphs of dry runs point at them until then
        for tensor in left:
            take_memory(tensor, torch.empty_like(tensor.detach(), device=device))
    with warnings.catch_warnings():
        # FSDP2 asks its shards for their addresses, and so do fake ones of a check that composes.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def take_memory(tensor: Any, memory: Any) -> bool:
    """Let a tensor on meta have the memory of another, and stay the object that it is; return whether it could.

    `torch.utils.swap_tensors` refuses what weak references or a graph point at, and it takes class, attributes and
    gradient hooks away, which are given back here.
    """
    import torch

    if type(memory) is not torch.Tensor or not tensor.is_meta:
        return False  # a fake tensor is one by its class
    cls, attributes, (before, after) = type(tensor), dict(vars(tensor)), gradient_hooks(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        memory = torch.nn.Parameter(memory, requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, memory)
    except RuntimeError:
        return False
    tensor.__class__ = cls
    vars(tensor).update(attributes)
    set_gradient_hooks(tensor, before, after)
    return True


def with_attributes_of(original: Any, twin: Any) -> Any:
    """Return a tensor that stands for another with the python attributes that code has set on that one.

    `copy.deepcopy` of a parameter leaves them behind (torch 2.11-2.15).
    """
    if not is_wrapper_subclass(type(original)):
        for name, value in vars(original).items():
            setattr(twin, name, value)
    return twin


def gradient_hooks(tensor: Any) -> tuple[Any, Any]:
    """Return the gradient hooks of a tensor, and those that run after it is accumulated, by number; None where none.

    They can be registered, and not be listed, by public names (torch 2.11-2.15).
    """
    with without_torch_functions():  # by which a class of tensors asks another tensor than the one that has them
        return getattr(tensor, "_backward_hooks", None), getattr(tensor, "_post_accumulate_grad_hooks", None)


def set_gradient_hooks(tensor: Any, before: Any, after: Any) -> None:
    """Give a tensor these gradient hooks instead of its own; see `gradient_hooks`. Their handles remove them still.

    Hooks that run after accumulation are added, and never taken off: torch keeps those that it has.
    """
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = None
    if before:
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


def has_argument(operator: Any, name: str) -> bool:
    """Return whether an operator has an argument of a name, as its schema says; schemas have no public home."""
    return any(argument.name == name for argument in operator._schema.arguments)


def foreach_mul_(tensors: Any, factor: Any) -> None:
    """Multiply a list of tensors in place in one kernel; foreach functions have no public names (torch 2.11-2.15)."""
    import torch

    torch._foreach_mul_(tensors, factor)


def foreach_lerp_(tensors: Any, ends: Any, weight: float) -> None:
    """Move a list of tensors towards others in place in one kernel; see `foreach_mul_`."""
    import torch

    torch._foreach_lerp_(tensors, ends, weight)


def foreach_norm(tensors: Any, norm_type: float) -> Any:
    """Return the norm of every tensor of a list in one kernel; see `foreach_mul_`."""
    import torch

    return torch._foreach_norm(tensors, norm_type)


# Products of the fused attention of a CPU and of its backward, which computes the scores again.
_CPU_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}


def scaled_product(a_MK: Any, b_KN: Any, scale_a: Any, scale_b: Any, dtype: Any) -> Any:
    """Return a product of float8 matrices with their scales; in torch 2.11 it is behind a private name alone."""
    import torch

    return torch._scaled_mm(a_MK, b_KN, scale_a, scale_b, out_dtype=dtype)


def num_flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator by torch's own formulas; 0 for those without one.

    The formulas are found by the operator's packet, which has no public name (torch 2.11-2.15). A product of integers
    counts as one of floating-point numbers, and the CPU's fused attention as the GPU's; torch has no formula for them,
    nor for grouped products, of which each row is multiplied with its group's matrix, whichever that is.
    """
    import torch
    from torch.utils.flop_counter import flop_registry

    packet = operator._overloadpacket
    products = _CPU_ATTENTION.get(packet.__name__)
    if products is not None:
        query, value = args[products > 2], args[2 + (products > 2)]
        return float(products * 2 * query.numel() * value.shape[-2])
    if packet.__name__ in ("_grouped_mm", "_scaled_grouped_mm"):
        mat_a, mat_b = args[:2]
        groups = mat_a.shape[0] if mat_a.dim() > mat_b.dim() else 1  # each has its part of the columns of mat_b
        return float(2 * mat_a.numel() // groups * mat_b.shape[-1])
    formula = flop_registry.get(torch.ops.aten.mm if packet is torch.ops.aten._int_mm else packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def has_flops(operator: Any) -> bool:
    """Return whether `num_flops` counts anything of an operator: products, convolutions and attention."""
    import torch
    from torch.utils.flop_counter import flop_registry

    packet = getattr(operator, "_overloadpacket", operator)
    known = packet in flop_registry or packet is torch.ops.aten._int_mm
    name = getattr(packet, "__name__", "")
    return known or name in _CPU_ATTENTION or name in ("_grouped_mm", "_scaled_grouped_mm")


def orthogonalised(matrix: Any, num_steps: int) -> Any:
    """Return a matrix orthogonalised in bfloat16 as `torch.optim.Muon` does it; it has no public name (2.11-2.15)."""
    from torch.optim import _muon as muon

    coefficients = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
    return muon._zeropower_via_newtonschulz(matrix, coefficients, num_steps, muon.EPS)


def unviewed(tensor: Any) -> Any:
    """Return a tensor that shares memory and graph, and is no view to autograd; aten operators have no public names.

    What DTensor's `to_local` returns may not be changed in place, and FSDP2 warns about modules that return views.
    """
    import torch

    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def record_memory_history(max_entries: int) -> None:
    """Let CUDA's allocator remember allocations and frees; torch documents it under its private name (2.11-2.15)."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: str) -> None:
    """Write what CUDA's allocator remembers, for torch's viewer (2.11-2.15, documented as private)."""
    import torch

    torch.cuda.memory._dump_snapshot(path)


def weak_tensor_dictionary() -> Any:
    """Return a dictionary of tensors that are kept by others, by identity; torch's own is private (2.11-2.15)."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def node_shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the tensor that an autograd node made, None where it says none or made several.

    Torch shows it under a private name alone (torch 2.11-2.15).
    """
    made: Any = getattr(node, "_input_metadata", ())
    return tuple(int(size) for size in made[0].shape) if len(made) == 1 else None
