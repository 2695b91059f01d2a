"""Torch's default generators, and the norm that its clipping computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["default_generators", "watch_total_norm"]


def default_generators(device: Any) -> list[Any]:
    """Return the default generators from which a process draws: the CPU's, and its device's.

    Args:
        device: `torch.device` of the run.
    """
    import torch

    found = [torch.default_generator]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found.append(module.default_generators[module.current_device() if device.index is None else device.index])
    return found


def watch_total_norm(before: Callable[[Sequence[Any]], None]) -> None:
    """Call a function with the gradients whose norm `torch.nn.utils.clip_grad_norm_` is about to compute.

    It looks this up by a private name of its module, whichever way it was imported itself (torch 2.11-2.15).
    """
    import torch.nn.utils.clip_grad as module

    inner = module._get_total_norm

    @functools.wraps(inner)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors) if not hasattr(tensors, "shape") else [tensors]
        before(tensors)
        return inner(tensors, *args, **kwargs)

    module._get_total_norm = watched
