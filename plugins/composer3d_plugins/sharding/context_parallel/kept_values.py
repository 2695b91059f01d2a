"""Tensors that a forward leaves in the model, or in lists and objects of its code, and whether a loss finds them.

Mixtures of experts keep the losses of their routers so, and a loss function adds them up.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import spec_of
from composer3d_plugins.sharding.context_parallel.loss_state import COLLECTIONS, PLAIN, held_by, is_library

__all__ = ["KeptValues"]

# Objects that are searched, once: of a module there are some twenty.
MOST = 200_000
LEFT_OUT = (*PLAIN, torch.device, torch.dtype, types.ModuleType)
# Tensors on meta in the dry run, whether a forward leaves them there or not.
OWN = ("_parameters", "_buffers")


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
        for owner, name, value in _reached(model):
            for each in _tensors(value):
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
        for _, name, value in _reached(loss):
            if isinstance(value, nn.Module) and type(value) in self.kinds:
                return f"{type(value).__name__}.{self.kinds[type(value)]}"
            if id(value) in self.holders:
                return name or type(value).__name__
        return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | deque):
        yield from (x for x in (value.values() if isinstance(value, Mapping) else value) if isinstance(x, Tensor))


def _reached(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is reached from an object, each with what holds it, and by which name."""
    seen: set[int] = set()
    waiting: deque[tuple[Any, str, Any]] = deque([(None, "", root)])
    while waiting and len(seen) < MOST:
        owner, name, value = waiting.popleft()
        yield owner, name, value
        if isinstance(value, (Tensor, *LEFT_OUT)) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend((value, inner or name, each) for inner, each in _named(value))


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object, or a class of a loop's own, holds, each with its name."""
    if isinstance(value, type):
        if not is_library(value.__module__):
            kinds = (Tensor, types.FunctionType, dict, *COLLECTIONS)
            yield from ((name, each) for name, each in vars(value).items() if isinstance(each, kinds))
            yield from (("", each) for each in value.__bases__)
        return
    if isinstance(value, nn.Module):
        yield from ((name, each) for name, each in vars(value).items() if name not in OWN)
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not isinstance(value, types.FunctionType):
        names = {id(each): name for name, each in attributes.items()}
        yield from ((names.get(id(each), ""), each) for each in held_by(value))
    else:
        yield from (("", each) for each in held_by(value))
    yield "", type(value)
