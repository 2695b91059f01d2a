"""Tags that torch gives its operators."""

from __future__ import annotations

__all__ = ["is_pointwise"]


def is_pointwise(name: str) -> bool:
    """Return whether torch tags an operator of this name as one that computes each element by itself.

    Private: the class of operators, which other attributes of their namespace do not have.
    """
    import torch

    operator = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(operator, overload).tags for overload in operator.overloads())
