"""Hooks on gradients of modules, and autograd functions that are not torch's, in graphs."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["module_gradient_hooks", "own_function"]


def module_gradient_hooks(module: nn.Module) -> tuple[MutableMapping[int, Any], MutableMapping[int, Any]]:
    """Return the full backward hooks of a module, after and before its backward; registered ones have no public name.

    Args:
        module: Its own, not its children's.
    """
    return module._backward_hooks, module._backward_pre_hooks


def own_function(node: Any) -> type | None:
    """Return the `torch.autograd.Function` of a node of a graph; None for torch's operators.

    The node knows it by a private name alone (torch 2.11-2.15).
    """
    return getattr(node, "_forward_cls", None)
