"""A call of a module: its arguments, and which of them is the activation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer3d import torch_compat

__all__ = ["SMALL", "Call", "activation_of", "first_of", "replaced"]

# The value of everything in runs with values: any but 0, by which code may divide. As an integer it is 0.
SMALL = 0.02


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module.

    Args:
        args: Positional ones.
        kwargs: Those by name.
        has_values: Whether the module is run with values, which is slower than on meta, because its code looks at some.
        kept: Shapes of tensors that it keeps, in an attribute or a list, and that code outside of all blocks uses.
        leaves: Whether code that runs after the model's forward, such as a loss, can reach tensors of blocks.
        seed: Of the random numbers that its code decides by, which are the same on all ranks.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    has_values: bool = False
    kept: frozenset[tuple[int, ...]] = frozenset()
    leaves: bool = False
    seed: int = 0

    def fresh(self) -> Call:
        """Return the same tensors in containers of their own: a module may change what it is given, such as a cache."""
        tensors = [
            leaf for leaf in torch_compat.tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)
        ]
        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)), {id(tensor): tensor for tensor in tensors})
        except Exception:  # an object of the model's own may refuse, for any reason
            return self
        return replace(self, args=args, kwargs=kwargs)

    def without_values(self) -> Call:
        """Return a call on meta."""

        def valueless(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_like(leaf, device="meta", requires_grad=leaf.requires_grad)

        args, kwargs = torch_compat.tree_map(valueless, [self.args, dict(self.kwargs)])
        return replace(self, args=tuple(args), kwargs=kwargs, has_values=False)

    def with_values(self, device: torch.device) -> Call:
        """Return a call with values: those that its tensors have, else the first token, and small numbers."""

        def valued(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.is_meta:
                return leaf.to(device)
            return torch.full(leaf.shape, SMALL, device=device).to(leaf.dtype)

        args, kwargs = torch_compat.tree_map(valued, [self.args, dict(self.kwargs)])
        return replace(self, args=tuple(args), kwargs=kwargs, has_values=True)


def activation_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the place of the activation that a block takes, its first floating-point argument of three dims."""
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in everything:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return key
    return None


def first_of(output: Any) -> Any:
    """Return the activation that a block passes on: what it returns, or the first of several."""
    return output[0] if isinstance(output, tuple) and output else output


def replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], key: int | str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which the one at `key` is changed."""
    if isinstance(key, int):
        return (*args[:key], change(args[key]), *args[key + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, key: change(kwargs[key])}
