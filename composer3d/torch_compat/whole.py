"""Parameters that FSDP2 does not take."""

from __future__ import annotations

from typing import Any

__all__ = ["scalar_parameters"]


def scalar_parameters(module: Any) -> set[Any]:
    """Return the parameters without dims, which FSDP2's units refuse, replicated ones too (torch 2.11-2.15).

    They cannot be sharded: they are left to `ignored_params`, and stay whole on every rank.
    """
    return {parameter for parameter in module.parameters() if not parameter.dim()}
