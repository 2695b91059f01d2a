"""Another reduce-scatter than the backend's, for operators of DTensor and for other Python code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from composer3d.torch_compat.collectives.messages import group_among

__all__ = ["replace_operator_sums"]

# torch 2.13 has the first name, torch 2.11 the second, which 2.13 still has and builds on the first.
_NAMES = ("reduce_scatter_single", "reduce_scatter_tensor")


def replace_operator_sums(is_replaced: Callable[[Any], bool], scatter: Callable[..., Any]) -> Callable[[], None]:
    """Replace the reduce-scatters that DTensor's operators and other Python code issue; return what ends that.

    They have no setter: the functions of the private module by which DTensor calls them are replaced, as for spans, and
    the public ones of torch.distributed (torch 2.11-2.15). Compiled code holds operators of its own, and keeps them.

    Args:
        is_replaced: Given the process group, returns whether its reduce-scatters are.
        scatter: Given the tensor, the dim, the group and whether a mean `is_mean` is wanted, returns this rank's part.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    def found(group: Any) -> Any:
        """Return the process group if its reduce-scatters are replaced."""
        known = None if torch.compiler.is_compiling() else group_among((group,))
        return known if known is not None and known.size() > 1 and is_replaced(known) else None

    def operator(function: Any) -> Any:
        @functools.wraps(function)
        def reduce_scatter(tensor: Any, reduceOp: str, scatter_dim: int, group: Any, tag: str = "") -> Any:
            over = found(group) if reduceOp.lower() in ("sum", "avg") else None
            if over is None:
                return function(tensor, reduceOp, scatter_dim, group, tag)
            return scatter(tensor, scatter_dim, over, is_mean=reduceOp.lower() == "avg")

        return reduce_scatter

    def public(function: Any) -> Any:
        @functools.wraps(function)
        def reduce_scatter(
            output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            is_known = not async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
            over = found(dist.group.WORLD if group is None else group) if is_known else None
            if over is None:
                return function(output, input, op, group, async_op)
            part = scatter(input.reshape(-1), 0, over, is_mean=op == dist.ReduceOp.AVG)
            output.copy_(part.view(output.shape))
            return None

        return reduce_scatter

    places = [(functional, name, operator) for name in _NAMES] + [(dist, name, public) for name in _NAMES]
    plain = [(module, name, getattr(module, name), make) for module, name, make in places if hasattr(module, name)]
    own = [(module, name, function, make(function)) for module, name, function, make in plain]
    for module, name, _, made in own:
        setattr(module, name, made)

    def end() -> None:
        # What watches collectives may have ended before, and put the function back.
        for module, name, function, made in own:
            if getattr(module, name) is made:
                setattr(module, name, function)

    return end
