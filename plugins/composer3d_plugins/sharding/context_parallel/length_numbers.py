"""Detection of numbers that a model's code derives from the sequence length, which padding would change.

Sizes, ends of ranges and of slices may follow the padded length: results in the padding are dropped. A number that
enters arithmetic, such as a rotary base that grows with the length, or log(length), would change results of real tokens
too. Therefore the model runs on meta for two lengths, and the traced functions of both runs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import Call, name_of, on_meta, patched, unseen
from composer3d_plugins.sharding.context_parallel.drawn_dims import DrawnDims
from composer3d_plugins.sharding.context_parallel.position_tables import Tables

__all__ = ["length_number", "named"]

# Functions whose numbers are sizes, dims and ends.
SHAPES = frozenset(
    """view reshape view_as expand expand_as broadcast_to flatten unflatten repeat tile repeat_interleave size shape dim
    numel __get__ empty zeros ones rand randn empty_like zeros_like ones_like new_empty new_zeros new_ones split chunk
    split_with_sizes tensor_split unbind pad fold unfold stride as_strided triu tril triu_indices tril_indices eye
    transpose permute movedim cat stack one_hot interpolate unsqueeze
    squeeze swapaxes bincount new_empty_strided empty_strided""".split()
)
# Functions that divide by how many they read, and others that read padding where no weight tells of it.
MEANS = frozenset("mean nanmean var std var_mean std_mean median nanmedian quantile".split())
READS = MEANS | frozenset(
    "sum nansum prod max amax min amin argmax argmin norm vector_norm normalize logsumexp topk sort argsort".split()
)
NUMBERS = (int, float, complex)
# Of a function: its name, the module at work, the numbers that it computes with, and the shape of its first argument.
_Noted = tuple[str, str, tuple[Any, ...], tuple[int, ...]]


def length_number(
    model: nn.Module, call: Call, *, tables: Tables, drawn: DrawnDims, shorter: int, has_products: bool
) -> str:
    """Return which module and function computes with a number of the length; empty if there is none.

    Args:
        model: The whole model.
        call: Of it, whole.
        tables: Notes the tables of positions that the call reads.
        drawn: Notes what both runs draw.
        shorter: Positions that the second length is shorter by.
        has_products: Whether attention is written out, of whose scores only a softmax is known to leave padding out.
    """
    lengths, fresh = tables.lengths, call.fresh()
    runs = [_noted(model, fresh, drawn, tables)]
    if min(lengths, default=0) <= shorter:
        return ""
    runs.append(_noted(model, _shortened(call, lengths, shorter).fresh(), drawn))
    drawn.compare()
    for (name, where, numbers, shape), (other, _, others, shape_2) in zip(*runs, strict=False):
        if name != other:
            return f"{named(where)} does something else for another length ({name}, and {other})"
        if numbers != others:
            return f"{named(where)} ({name}) computes with a number of the length"
        if name in (READS if has_products else MEANS) and _goes_along(
            numbers, [a != b for a, b in zip(shape, shape_2, strict=False)]
        ):
            return f"{named(where)} ({name}) reads all positions, and not as a softmax does"
    return "" if len(runs[0]) == len(runs[1]) else '"" does more for a longer sequence'


def _goes_along(numbers: Sequence[Any], differs: Sequence[bool]) -> bool:
    """Return whether a mean over dims, or over all where none is given, is one over positions."""
    dims = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
    return any(differs[dim] for dim in dims if -len(differs) <= dim < len(differs)) if dims else any(differs)


def _shortened(call: Call, lengths: Collection[int], shorter: int) -> Call:
    def narrowed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        for dim, size in enumerate(leaf.shape):
            if dim and size in lengths:
                leaf = leaf.narrow(dim, 0, size - shorter)
        return leaf

    args, kwargs = torch_compat.tree_map(narrowed, [call.args, dict(call.kwargs)])
    return Call(args=tuple(args), kwargs=kwargs, has_values=call.has_values)


def _noted(model: nn.Module, call: Call, drawn: DrawnDims, tables: Tables | None = None) -> list[_Noted]:
    """Run a call on meta; return what its functions compute with."""
    found: list[_Noted] = []
    drawn.begin(call.seed if call.has_values else torch.default_generator.initial_seed())
    at_work: list[str] = []

    def tracked(fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        inner = forward if call.has_values or not fqn else unseen(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            at_work.append(fqn)
            try:
                return inner(*args, **kwargs)
            finally:
                at_work.pop()

        return run

    def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        name = name_of(func)
        drawn.note(func, args, kwargs, result)
        if tables is not None:
            tables.note(func, args, result, at_work[-1] if at_work else "")
        if name not in SHAPES:
            shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
            found.append((name, at_work[-1] if at_work else "", tuple(_numbers(name, args, kwargs)), shape))

    forwards = {module: tracked(fqn, module.forward) for fqn, module in model.named_modules()}
    with patched(forwards):
        on_meta(model, call, notes=[note], seen=None if tables is None else tables.see)
    return found


def _numbers(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the numbers among a function's arguments that are more than ends of ranges."""
    if name == "arange":
        start, _, step = _range(args)
        return [start, step]
    if name in ("narrow", "select"):
        return list(args[1:3])
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        starts = [entry.start or 0 if isinstance(entry, slice) else entry for entry in index]
        return [entry for entry in starts if isinstance(entry, NUMBERS)] + _plain(args[2:])
    if name in ("full", "new_full"):
        return _plain([args[-1] if "fill_value" not in kwargs else kwargs["fill_value"]])
    return _plain(args) + _plain(kwargs.values())


def _range(args: Sequence[Any]) -> tuple[Any, Any, Any]:
    numbers = [value for value in args if isinstance(value, NUMBERS)]
    if len(numbers) < 2:
        return 0, numbers[0] if numbers else None, 1
    return numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else 1


def _plain(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, NUMBERS):
            found.append(value)
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            found += _plain(value)
    return found


def named(fqn: str) -> str:
    """Return a module's name as messages give it."""
    return f'"{fqn}"' if fqn else "the model's own code"
