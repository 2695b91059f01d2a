"""Functions of a model's own code that torch recomputes in the backward, when no propagation is at work any more.

Blocks are entered by themselves then. A function inside of one, as `checkpoint(self._forward, x)` has it, is not: its
attention would be that of a rank's positions alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation.shards import attach, spec_of

__all__ = ["propagated_again"]

# First parts of the names of modules whose functions enter blocks, this package's and its plugins'.
LIBRARIES = ("torch", "composer3d")


def propagated_again(
    function: Any,
    given: Sequence[Any],
    *,
    axis: str,
    is_at_work: Callable[[], bool],
    propagate: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Any:
    """Return a function that is propagated where it runs outside of a forward; modules are as they are.

    Args:
        function: That torch recomputes.
        given: Its arguments, where it is given copies of them that have lost their marks.
        axis: Of the marks.
        is_at_work: Returns whether a propagation is.
        propagate: Runs a function in one.
    """
    inner = function.func if isinstance(function, functools.partial) else function
    where = getattr(getattr(inner, "__func__", inner), "__globals__", {}).get("__name__", "")
    if isinstance(inner, nn.Module) or not where or where.partition(".")[0].startswith(LIBRARIES):
        return function
    specs = [spec_of(leaf, axis) for leaf in torch_compat.tree_leaves(list(given)) if isinstance(leaf, Tensor)]

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if is_at_work():
            return function(*args, **kwargs)
        leaves = [leaf for leaf in torch_compat.tree_leaves([list(args), kwargs]) if isinstance(leaf, Tensor)]
        for leaf, spec in zip(leaves, specs, strict=False):
            if spec is not None:
                attach(leaf, spec)
        return propagate(function, args, kwargs)

    return recomputed
