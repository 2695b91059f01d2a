"""Tensors that a forward leaves in the model, or in lists and objects of its code, and whether a loss finds them.

Mixtures of experts keep the losses of their routers so, and a loss function adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import reached_from, spec_of, tensors_of

__all__ = ["KeptValues"]


@dataclass(kw_only=True)
class KeptValues:
    """Holders of such tensors after a forward.

    Attributes:
        kinds: Names of the attributes, by the class of their module.
        holders: Lists, dicts, objects and classes outside of modules, by identity.
    """

    kinds: dict[type, str] = field(default_factory=dict)
    holders: dict[int, Any] = field(default_factory=dict)

    def after(
        self, forwards: Mapping[nn.Module, Callable[..., Any]], model: nn.Module, axis: str
    ) -> dict[nn.Module, Callable[..., Any]]:
        """Return forwards for a run on meta, after which what the model's code can reach is searched.

        Args:
            forwards: Of its modules, and of itself.
            model: Any.
            axis: Of the marks of shards.
        """

        def searched(*args: Any, **kwargs: Any) -> Any:
            output = forwards[model](*args, **kwargs)
            with torch_compat.without_torch_functions():
                self._search(model, axis)
            return output

        return {**forwards, model: searched}

    def _search(self, model: nn.Module, axis: str) -> None:
        for owner, name, value in reached_from(model):
            for each in tensors_of(value):
                if each.is_meta and (each.grad_fn is not None or spec_of(each, axis) is not None):
                    if isinstance(owner, nn.Module):
                        self.kinds.setdefault(type(owner), name)
                    holder = owner if isinstance(value, Tensor) else value
                    self.holders[id(holder)] = holder
                    break

    def read_by(self, loss: Any) -> str:
        """Return by what name a loss function can reach such a tensor; empty where it cannot."""
        if not self.holders:
            return ""
        for _, name, value in reached_from(loss):
            if isinstance(value, nn.Module) and type(value) in self.kinds:
                return f"{type(value).__name__}.{self.kinds[type(value)]}"
            if id(value) in self.holders:
                return name or type(value).__name__
        return ""
