"""Tied parameters that only one module uses: the other names of them take whatever placement it has.

BERT's head is one: its bias is a parameter of the module around it too, whose code never reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from composer3d import PluginError, RunContext, torch_compat
from composer3d.propagation import kind_of, on_meta, patched, trace

__all__ = ["owner_of", "unread_names"]


def owner_of(name: str) -> str:
    """Return the module that a parameter is one of."""
    return name.rpartition(".")[0]


def unread_names(model: nn.Module, context: RunContext) -> frozenset[str]:
    """Return the names of tied parameters by which no code reads them, as far as a run on meta shows."""
    groups: list[tuple[list[str], list[str]]] = []
    for group in context.ties:
        working = [name for name in group if kind_of(model.get_submodule(owner_of(name))) != "other"]
        others = [name for name in group if name not in working]
        if working and others:
            groups.append((working, others))
    if not groups:
        return frozenset()
    try:
        call = trace(model, context, blocks=()).call
    except PluginError:
        return frozenset()
    found: set[str] = set()
    for working, others in groups:
        reading = _Reading()
        owners = [model.get_submodule(owner_of(name)) for name in working]
        watch = functools.partial(reading.watch, names=set(working) | set(others))
        with patched({owner: reading.inside(owner.forward) for owner in owners}):
            on_meta(model, call, seen=watch, notes=[reading.note])
        if not reading.is_read:
            found |= set(others)
    return frozenset(found)


class _Reading:
    """Records whether a function takes a tensor outside of certain modules.

    Attributes:
        is_read: Whether anything does.
    """

    def __init__(self) -> None:
        self.is_read = False
        self._depth = 0
        self._watched: set[int] = set()

    def watch(self, tensors: Mapping[str, torch.Tensor], names: set[str]) -> None:
        """Set the tensors to watch."""
        self._watched = {id(tensor) for name, tensor in tensors.items() if name in names}

    def inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward in which they may be taken."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._depth -= 1

        return answer

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record whether a function took one of them."""
        if not self._depth:
            leaves = torch_compat.tree_leaves([list(args), dict(kwargs)])
            takes = any(id(leaf) in self._watched for leaf in leaves)
            gives = any(isinstance(leaf, torch.Tensor) for leaf in torch_compat.tree_leaves(result))
            self.is_read = self.is_read or (takes and gives)
