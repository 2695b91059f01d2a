"""Modules that cannot be composed because they contain themselves, or have no shapes yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["unreadable"]


def unreadable(model: nn.Module) -> str | None:
    """Return what makes a model unreadable, and how to write it: a cycle of modules, or lazy parameters; else None.

    Args:
        model: Any module.
    """
    if (fqn := _cycle(model)) is not None:
        return (
            f'the model contains itself: "{fqn}" is a module that it is inside of; keep a reference that is no '
            "submodule, in a tuple or a weakref for example"
        )
    from torch.nn.parameter import is_lazy

    lazy = next((fqn for fqn, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)), None)
    if lazy is None:
        return None
    owner = type(model.get_submodule(lazy.rpartition(".")[0])).__name__
    return (
        f'"{lazy}" of a {owner} has no shape before the first forward; write a module with its sizes, such as '
        "nn.Linear(in_features, out_features)"
    )


def _cycle(model: nn.Module) -> str | None:
    """Return the FQN of a module that is inside of itself; None where there is none."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, fqn: str, above: tuple[nn.Module, ...]) -> str | None:
        if module in seen:
            return None
        seen.add(module)
        for name, child in module.named_children():
            inner = f"{fqn}.{name}".removeprefix(".")
            if child is module or child in above:
                return inner
            if (found := walk(child, inner, (*above, module))) is not None:
                return found
        return None

    return walk(model, "", ())
