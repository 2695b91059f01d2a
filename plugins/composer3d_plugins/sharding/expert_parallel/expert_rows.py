"""State that stacked experts have for each of them beside weights: rows of buffers, tensors and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, stacked_number

if TYPE_CHECKING:
    from torch import nn

__all__ = ["local_rows", "owners_of_rows", "refuse_unknown_rows", "rows_of_experts"]


def rows_of_experts(module: nn.Module) -> list[str]:
    """Return the names of buffers that have a row for each expert, as scales or counts of tokens."""
    number = stacked_number(module)
    return [
        f"{fqn}.{name}".lstrip(".")
        for fqn, owner in owners_of_rows(module)
        for name in _rows(dict(owner._buffers), number)
    ]


def refuse_unknown_rows(module: nn.Module, fqn: str) -> None:
    """Refuse a buffer of one dim that may have an element for each expert, or for each of as many features.

    Raises:
        PluginError: Its name does not say which.
    """
    number = stacked_number(module)
    if number not in {size for parameter in module.parameters() for size in parameter.shape[1:]}:
        return
    for name in rows_of_experts(module):
        if module.get_buffer(name).ndim == 1 and "expert" not in name:
            raise PluginError(
                f'expert_parallel: "{fqn}.{name}" has {number} elements, and there are as many experts as features: '
                "nothing says which it has one for, and ranks hold rows of experts alone",
                hint="name it with `expert`, or give it a second dim",
            )


@contextmanager
def local_rows(owners: Sequence[nn.Module], number: int, held: slice) -> Iterator[None]:
    """Let the code of modules read, and write, the rows of this rank's experts as if they were all.

    Args:
        owners: Modules that may have such rows.
        number: How many they are.
        held: Which ones this rank has.
    """
    import torch

    before: list[tuple[dict[str, Any], str, Any, Any]] = []
    for owner in owners:
        for values in (owner._buffers, vars(owner)):
            for name, value in _rows(values, number).items():
                if name in owner._parameters:  # shadowed while it is read
                    continue
                before.append((values, name, value, value[held]))
                values[name] = before[-1][-1]
    try:
        yield
    finally:
        for values, name, value, given in before:
            now = values.get(name)
            if isinstance(value, torch.Tensor):
                if now is not given and isinstance(now, torch.Tensor) and now.shape == given.shape:
                    with torch.no_grad():
                        value[held] = now
            elif isinstance(value, list) and isinstance(now, list) and len(now) == len(given):
                value[held] = now
            values[name] = value


def owners_of_rows(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside of one, by name, that are no layers of torch: a norm has as many rows by accident."""
    return [(fqn, each) for fqn, each in module.named_modules() if not type(each).__module__.startswith("torch.")]


def _rows(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the tensors, and the lists and tuples of numbers, that are as long as there are experts."""
    import torch
    from torch import nn

    def is_of_each(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.ndim > 0 and value.shape[0] == number and not isinstance(value, nn.Parameter)
        is_list = type(value) in (list, tuple) and len(value) == number
        return is_list and all(type(each) in (int, float) for each in value)

    return {name: value for name, value in values.items() if is_of_each(value)}
