"""State that a loss function reads besides its arguments: where it changes, the function may relate positions anew."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import torch

from composer3d.propagation import PLAIN, held_by

__all__ = ["state_of"]

# Objects that are looked at; a loss may hold a trainer, and that everything.
MOST = 2000
# What is known not to change what a loss does, or is the code of libraries.
LEFT_OUT = (torch.Tensor, type, types.ModuleType, torch.device, torch.dtype)


def state_of(loss: Any) -> list[Any]:
    """Return the numbers, strings and flags that a loss function can read: of itself, of closures, and of globals.

    Args:
        loss: A function, a partial, a method, or an object that is called.
    """
    seen: set[int] = set()
    found: list[Any] = []
    waiting = deque([loss])
    while waiting and len(seen) < MOST:
        value = waiting.popleft()
        if isinstance(value, PLAIN):
            found.append(value)
        elif not isinstance(value, LEFT_OUT) and id(value) not in seen:
            seen.add(id(value))
            held = list(held_by(value))
            found.append((type(value).__name__, len(held)))
            waiting.extend(held)
    return found
