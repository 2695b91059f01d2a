"""Local shards of parameters under the parameters' own names, while a module's code runs that multiplies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import Placed, PropagationError, mark

__all__ = ["finding", "held_by", "tried"]


def held_by(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the holder of a parameter, the module or a list of parameters in it, and the parameter's name there."""
    owner, _, own = name.rpartition(".")
    return module.get_submodule(owner), own


def finding(module: nn.Module, locals_of: Callable[[], Mapping[str, Tensor]]) -> Callable[..., Any]:
    """Return a module's forward, keeping its name, whose code finds other tensors than the module's parameters.

    Args:
        module: Its code multiplies parameters of its own, or of lists of parameters in it.
        locals_of: Returns the tensors by the parameters' names.
    """
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def multiplying(*args: Any, **kwargs: Any) -> Any:
        with torch_compat.without_torch_functions():
            found = locals_of()
        # What stands in a holder's own dictionary is found before its parameters are.
        places = {name: held_by(module, name) for name in found}
        for name, (holder, own) in places.items():
            vars(holder)[own] = found[name]
        try:
            return forward(*args, **kwargs)
        finally:
            for holder, own in places.values():
                vars(holder).pop(own, None)

    return multiplying


def tried(module: nn.Module, fqn: str, weights: Mapping[str, Placed], degree: int) -> Callable[..., Any]:
    """Return a module's forward in a dry run on meta, whose code finds marked shards of its parameters.

    Args:
        module: Its code multiplies parameters of its own.
        fqn: In the block.
        weights: What is sharded of the parameters that it uses, by their names in the block.
        degree: Ranks along tp.
    """

    def share(name: str) -> Tensor:
        holder, own = held_by(module, inside(name))
        placed, whole = weights[name], holder._parameters[own]
        assert whole is not None, "its shape is known"
        piece = whole.narrow(placed.dim, 0, whole.shape[placed.dim] // degree)
        return mark(piece, placed=placed, degree=degree, sources=frozenset({name}), is_weight=True)

    def inside(name: str) -> str:
        return name.removeprefix(f"{fqn}." if fqn else "")

    forward = finding(module, lambda: {inside(name): share(name) for name in weights})

    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except PropagationError:
            raise
        except Exception as error:  # a model's own code may raise anything
            raise PropagationError.of_code(error) from error

    return answer
