"""Settings of a process that decide what tensor code computes, as they are in a new one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["neutral_state"]


@contextmanager
def neutral_state() -> Iterator[None]:
    """Compute inside as a new process would, forked children too, and leave the caller's settings as they were.

    Gradients are recorded, also within `torch.no_grad()` and `torch.inference_mode()`; there is no autocast; the
    default dtype is float32 and the default device the CPU; modes that see torch's functions and operators are off, and
    so are deterministic algorithms. The states of Python's, numpy's and torch's random numbers for the CPU are those
    from before, afterwards.

    Memory: the three states, 10 kB. Collectives: none.
    """
    with ExitStack() as stack:
        if sys.modules.get("torch") is not None:
            _enter_torch(stack)
        stack.callback(random.setstate, random.getstate())
        drawn: Any = sys.modules.get("numpy.random")
        if drawn is not None:
            stack.callback(drawn.set_state, drawn.get_state())
        yield


def _enter_torch(stack: ExitStack) -> None:
    """Enter the neutral state of torch; only what differs is touched."""
    import torch

    from composer3d.torch_compat.ambient_modes import outside_modes

    stack.enter_context(outside_modes())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    accelerator = torch.accelerator.current_accelerator()
    for kind in {"cpu", accelerator.type if accelerator is not None else "cpu"}:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
    stack.callback(torch.set_rng_state, torch.get_rng_state())
