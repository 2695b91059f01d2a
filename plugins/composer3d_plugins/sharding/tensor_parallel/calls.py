"""A call of a module: its arguments, and which of them is the activation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from composer3d import torch_compat

__all__ = ["Call", "activation_of", "first_of", "replaced"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def fresh(self) -> Call:
        """Return the same tensors in containers of their own: a module may change what it is given, such as a cache."""
        tensors = [
            leaf for leaf in torch_compat.tree_leaves([self.args, dict(self.kwargs)]) if isinstance(leaf, Tensor)
        ]
        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)), {id(tensor): tensor for tensor in tensors})
        except Exception:  # an object of the model's own may refuse, for any reason
            return self
        return Call(args=args, kwargs=kwargs)


def activation_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return the place of the activation that a block takes, its first floating-point argument of three dims."""
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in everything:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return key
    return None


def first_of(output: Any) -> Any:
    """Return the activation that a block hands on: what it returns, or the first of several."""
    return output[0] if isinstance(output, tuple) and output else output


def replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], key: int | str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of which the one at `key` is changed."""
    if isinstance(key, int):
        return (*args[:key], change(args[key]), *args[key + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, key: change(kwargs[key])}
