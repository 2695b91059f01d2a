"""Local shards of parameters under the parameters' own names, while a module's code runs that multiplies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import Placed, PropagationError, mark

__all__ = ["finding", "tried"]


def finding(module: nn.Module, locals_of: Callable[[], Mapping[str, Tensor]]) -> Callable[..., Any]:
    """Return a module's forward, keeping its name, whose code finds other tensors than the module's parameters.

    Args:
        module: Its code multiplies parameters of its own.
        locals_of: Returns the tensors by the parameters' names.
    """
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def multiplying(*args: Any, **kwargs: Any) -> Any:
        with torch_compat.without_torch_functions():
            found = locals_of()
        # What stands in the module's own dictionary is found before its parameters are.
        vars(module).update(found)
        try:
            return forward(*args, **kwargs)
        finally:
            for name in found:
                vars(module).pop(name, None)

    return multiplying


def tried(module: nn.Module, fqn: str, weights: Mapping[str, Placed], degree: int) -> Callable[..., Any]:
    """Return a module's forward in a dry run on meta, whose code finds marked shards of its parameters.

    Args:
        module: Its code multiplies parameters of its own.
        fqn: In the block.
        weights: What is sharded of the block's parameters, by their names in it.
        degree: Ranks along tp.
    """

    def share(name: str) -> Tensor:
        placed, whole = weights[name], module._parameters[name.rpartition(".")[2]]
        assert whole is not None, "its shape is known"
        piece = whole.narrow(placed.dim, 0, whole.shape[placed.dim] // degree)
        return mark(piece, placed=placed, degree=degree, sources=frozenset({name}), is_weight=True)

    own = [name for name in weights if name.rpartition(".")[0] == fqn]
    forward = finding(module, lambda: {name.rpartition(".")[2]: share(name) for name in own})

    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except PropagationError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise PropagationError(f"its code cannot be run by itself ({type(error).__name__}: {error})") from error

    return answer
