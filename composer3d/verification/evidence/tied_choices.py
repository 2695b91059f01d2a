"""Choices among scores that are equal up to rounding, as of experts by a router: another layout may choose others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["watching_choices"]

_CHOICES = frozenset(("argmax", "argmin", "max", "min", "topk"))
_ROUNDING = 64  # spacings of the largest score


@contextlib.contextmanager
def watching_choices(run: Composition, found: dict[str, int]) -> Iterator[None]:
    """Count rows in which the last score that is chosen and the first that is not are equal up to rounding.

    Args:
        run: Whose modules' calls are watched.
        found: Gets their number by the FQN of the module whose code chooses, "" for the loss.
    """
    from torch.overrides import TorchFunctionMode

    inside: list[str] = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = getattr(function, "__name__", "")
            if name in _CHOICES and args:
                number = _ties(name, *args, **kwargs)
                if number:
                    fqn = inside[-1] if inside else ""
                    found[fqn] = found.get(fqn, 0) + number
            return function(*args, **kwargs)

    def leave(*_: Any) -> None:
        inside.pop()

    hooks: list[Any] = []
    for part in run.parts:
        for fqn, module in part.module.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda module, args, fqn=fqn: inside.append(fqn)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with Watched():
            yield
    finally:
        for handle in hooks:
            handle.remove()


def _ties(name: str, scores: Tensor, *args: Any, **options: Any) -> int:
    """Return in how many rows a choice is among equals; arguments are those of the choosing function."""
    import torch

    given = dict(zip(("k", "dim") if name == "topk" else ("dim",), args, strict=False)) | options
    number, dim = given.get("k", 1), given.get("dim", -1 if name == "topk" else None)
    if name in ("max", "min") and not isinstance(dim, int):
        return 0  # of all elements, or of two tensors: nothing is chosen
    values = scores.detach().flatten() if dim is None else scores.detach().movedim(dim, -1)
    if not values.is_floating_point() or values.is_meta or not 0 < number < values.shape[-1]:
        return 0
    is_least = name in ("argmin", "min") or options.get("largest", True) is False
    best = values.topk(number + 1, largest=not is_least).values
    margins, sizes = (best[..., -2] - best[..., -1]).abs(), best.abs().amax(-1)
    # Of scores that are masked out, any may be chosen: they are equal on purpose.
    is_tie = (margins <= _ROUNDING * torch.finfo(values.dtype).eps * sizes) & best[..., -1].isfinite()
    return int(is_tie.sum())
