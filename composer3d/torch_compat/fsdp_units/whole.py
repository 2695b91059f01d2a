"""Parameters that FSDP2 does not take."""

from __future__ import annotations

from typing import Any

__all__ = ["whole_parameters"]


def whole_parameters(module: Any) -> set[Any]:
    """Return the parameters without dims or elements, which FSDP2's units refuse or fail at (torch 2.11-2.15).

    They cannot be sharded: they are left to `ignored_params`, and stay whole on every rank.
    """
    return {parameter for parameter in module.parameters() if not (parameter.dim() and parameter.numel())}
