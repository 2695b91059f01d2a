"""Tensors that a module's hooks recompute before every forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["recomputed_tensors"]


def recomputed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return what stands for the tensors that torch's older reparametrisations keep as attributes, by their `id`.

    `torch.nn.utils.weight_norm`, `spectral_norm` and pruning keep `weight` as a plain attribute, which a hook before
    every forward computes from parameters. As a result of that computation it is no leaf, and `copy.deepcopy` refuses
    it; as a `memo` of `copy.deepcopy` the answer gives copies a detached one, which their first forward replaces. The
    hooks name their tensor in an attribute that torch does not document (`name`, or `_tensor_name`).

    Args:
        model: Left as it is.

    Memory: none. Collectives: none.
    """
    import torch

    found: dict[int, Tensor] = {}
    for module in model.modules():
        hooks = module._forward_pre_hooks.values()
        names = {getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")}
        for name, value in vars(module).items():
            if name in names and isinstance(value, torch.Tensor) and not value.is_leaf:
                found[id(value)] = value.detach()
    return found
