"""Inputs of a model: one tensor, or several by position and by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Inputs", "call_of", "named_leaves", "num_rows", "stacked"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Several inputs of a model, of one sample or stacked; a model of one input is given its tensor alone.

    Args:
        args: By position: tensors, or nested tuples and dicts of them.
        kwargs: Tensors by the name of the forward's argument.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def call_of(inputs: Tensor | Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments of a forward."""
    return (inputs.args, dict(inputs.kwargs)) if isinstance(inputs, Inputs) else ((inputs,), {})


def num_rows(inputs: Tensor | Inputs) -> int:
    """Return the length of one row of tokens; 1 for anything else."""
    return len(inputs) if isinstance(inputs, Tensor) and inputs.dim() else 1


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of inputs or targets, each with a name for messages, as in `inputs["image"]`."""
    if isinstance(value, Inputs):
        for place, item in enumerate(value.args):
            yield from named_leaves(item, f"input {place}")
        for key, item in value.kwargs.items():
            yield from named_leaves(item, f'input "{key}"')
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(item, f'{name}["{key}"]')
    elif isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from named_leaves(item, f"{name}[{place}]")
    elif value is not None:
        yield name, value


def stacked(values: Sequence[Any]) -> Any:
    """Return one value of the form of each, its tensors stacked along a new first dim; their shapes are equal.

    >>> stacked([{"x": torch.zeros(3)}, {"x": torch.ones(3)}])["x"].shape
    torch.Size([2, 3])
    """
    first = values[0]
    if isinstance(first, Inputs):
        args = stacked([value.args for value in values])
        return Inputs(args=args, kwargs=stacked([value.kwargs for value in values]))
    if isinstance(first, Mapping):
        return {key: stacked([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([value[place] for value in values]) for place in range(len(first)))
    return None if first is None else torch.stack(list(values))
