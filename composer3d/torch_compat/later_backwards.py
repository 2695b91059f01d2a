"""Backwards that a loop runs itself, looked at before autograd runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["LaterBackwards", "in_backward", "look_at", "unwatched_grad"]

_watching: set[LaterBackwards] = set()
_plain: dict[str, Callable[..., Any]] = {}


class LaterBackwards:
    """Calls a function with what `torch.autograd.backward`, `Tensor.backward` or `torch.autograd.grad` start from.

    A node of a graph reads what it has saved before any hook of a parameter runs, and torch has no hook on the start of
    a backward. So the two functions are replaced in torch's module, while somebody watches and no longer.

    Args:
        look: Called with the nodes; it may raise.
    """

    def __init__(self, look: Callable[[Iterable[Any]], None]) -> None:
        self.look = look

    def open(self) -> None:
        """Begin to watch."""
        import torch

        if not _watching:
            for name in ("backward", "grad"):
                _plain[name] = getattr(torch.autograd, name)
                setattr(torch.autograd, name, _looking(_plain[name]))
        _watching.add(self)

    def shut(self) -> None:
        """Watch no longer; nothing where this one did not."""
        import torch

        if self not in _watching:
            return
        _watching.discard(self)
        if not _watching:
            for name, function in _plain.items():
                # Somebody else may have put another function there.
                if getattr(getattr(torch.autograd, name), "__wrapped__", None) is function:
                    setattr(torch.autograd, name, function)
            _plain.clear()


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread: a forward inside is a recomputation.

    The number of the running graph task is private (torch 2.11-2.15); it is -1 outside of backwards.
    """
    import torch

    return torch._C._current_graph_task_id() != -1


def unwatched_grad(*args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad` unseen by those who watch: of numbers, before the graph of any parameter."""
    import torch

    return _plain.get("grad", torch.autograd.grad)(*args, **kwargs)


def look_at(tensors: Any) -> None:
    """Call those who watch with the nodes that a backward of some tensors, or of one, starts from.

    Args:
        tensors: As `torch.autograd.backward` takes them.
    """
    import torch

    if not _watching or in_backward():  # of what is recomputed in it
        return
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors or ())
    nodes = [each.grad_fn for each in several if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    for each in tuple(_watching):
        each.look(nodes)


def _looking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        look_at(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        return function(*args, **kwargs)

    return looking
