"""Steps of groups that hold plain parameters and DTensors: fused and foreach kernels refuse to take both at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError

if TYPE_CHECKING:
    import torch

__all__ = ["by_kind", "keep_written"]

_WHY = (
    "and this group has plain and sharded ones, which are stepped one kind after the other; give run.optimizer a group "
    'of each, as {"match": REGULAR_EXPRESSION}'
)


def by_kind(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a bare step that finds groups of plain tensors and groups of DTensors, each with a group's options.

    Outside of it the groups are those of the loop, for schedulers and for what writes into them. Groups without
    parameters, as a stage has, are not shown to the step. What it writes into a group's options is kept.

    Args:
        step: Without hooks, which find groups as they are.

    Raises:
        StepError: The step has written one thing for a group's plain tensors and another for its DTensors.
    """

    @functools.wraps(step)
    def stepped(optimizer: torch.optim.Optimizer) -> Any:
        groups = optimizer.param_groups
        divided = [(group, list(_kinds(group))) for group in groups]
        pieces = [piece for _, own in divided for piece in own]
        if len(pieces) == len(groups) or not pieces:
            return step(optimizer)
        optimizer.param_groups = pieces
        try:
            result = step(optimizer)
        finally:
            optimizer.param_groups = groups
        for group, own in divided:
            keep_written(group, own, cls=type(optimizer), why=_WHY)
        return result

    return stepped


def _kinds(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the group itself where its parameters are of one kind, else a group of each; none where it is empty."""
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[Any]] = {}
    for parameter in group["params"]:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    if len(kinds) == 1:
        yield group
    else:
        yield from ({**group, "params": parameters} for parameters in kinds.values())


def keep_written(group: dict[str, Any], pieces: list[dict[str, Any]], *, cls: type, why: str) -> None:
    """Put what a step has written into the options of a divided group's pieces into the group.

    Args:
        group: The whole one.
        pieces: Copies of it, each with some of its parameters, in the order in which they were stepped.
        cls: Of the optimizer.
        why: Why the group is divided, and what to do.

    Raises:
        StepError: It has written one thing for one piece, and another for another.
    """
    before = dict(group)
    for piece in pieces:
        written = {key: value for key, value in piece.items() if key != "params" and value is not before.get(key)}
        for key, value in written.items():
            if piece is not pieces[0] and not _is_equal(value, group.get(key)):
                raise StepError(f'{cls.__name__} computes "{key}" of a group from its parameters, {why}')
            group[key] = value


def _is_equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
