"""State that a model or its loss keeps beside parameters and saved buffers, and changes while it computes.

Tensors, numbers and generators that are attributes of a module or of the loss, or in the closure of a function.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.interfaces import LossFunction

__all__ = ["LOSS_KEEPS", "changed", "kept_beside", "kept_by_loss"]

LOSS_KEEPS = "the loss's "


def kept_beside(run: Composition, loss_fn: LossFunction | None) -> dict[str, Any]:
    """Return copies by name: `FQN.attribute`, and `the loss's attribute`. Collectives: none."""
    found: dict[str, Any] = {}
    for part in run.parts:
        saved = part.module.state_dict(keep_vars=True).keys()
        for fqn, module in part.module.named_modules():
            named = [*vars(module).items(), *module.named_buffers(recurse=False)]
            prefix = f"{fqn}." if fqn else ""
            found |= {f"{prefix}{name}": value for name, value in _copied(named) if f"{prefix}{name}" not in saved}
    return found | kept_by_loss(loss_fn)


def kept_by_loss(loss_fn: LossFunction | None) -> dict[str, Any]:
    """Return copies of what a loss keeps, by name."""
    return {f"{LOSS_KEEPS}{name}": value for name, value in _copied(_of_callable(loss_fn))}


def changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names under which there is something else."""
    both = {**one, **other}
    return [name for name in both if not (name in one and name in other and _equal(one[name], other[name]))]


def _of_callable(value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield what a callable keeps: of a method its owner's, of a partial its function's."""
    from torch import nn

    if isinstance(value, functools.partial):
        yield from _of_callable(value.func, depth)
        return
    if isinstance(value, nn.Module):
        for fqn, module in value.named_modules():
            prefix = f"{fqn}." if fqn else ""
            yield from ((f"{prefix}{name}", item) for name, item in vars(module).items())
            yield from ((f"{prefix}{name}", buffer) for name, buffer in module.named_buffers(recurse=False))
        return
    owner = getattr(value, "__self__", value)
    if hasattr(owner, "__dict__"):
        yield from ((name, item) for name, item in vars(owner).items() if name != "__wrapped__")
    if owner is not value:
        return
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(value, "__closure__", None) or (), strict=False):
        try:
            held = cell.cell_contents
        except ValueError:  # it is empty
            continue
        yield name, held
        if depth and callable(held):
            yield from _of_callable(held, depth - 1)


def _copied(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield copies of tensors, numbers and states of generators; containers of those by their entries."""
    import torch

    for name, value in named:
        if isinstance(value, torch.Tensor) and not value.is_meta:
            yield name, value.detach().clone()
        elif isinstance(value, torch.Generator):
            yield name, value.get_state()
        elif isinstance(value, int | float) and name != "training":
            yield name, value
        elif isinstance(value, Mapping) and not name.startswith("_"):
            yield from _copied((f"{name}[{key!r}]", item) for key, item in value.items() if _is_plain(item))
        elif isinstance(value, list | tuple) and not name.startswith("_"):
            yield from _copied((f"{name}[{key}]", item) for key, item in enumerate(value) if _is_plain(item))


def _is_plain(value: Any) -> bool:
    import torch

    return isinstance(value, int | float | torch.Tensor)


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return type(one) is type(other) and (one == other or (one != one and other != other))
