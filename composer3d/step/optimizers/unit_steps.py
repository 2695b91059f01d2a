"""Optimizer steps unit by unit, so that the parameters of a unit travel while those of others are stepped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d.step.optimizers.kinds import keep_written
from composer3d.step.optimizers.shard_step import steps_each_element

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SteppedUnit", "SteppedUnits", "refused_in_units", "unit_by_unit"]

_WHY = "and units of a plugin are stepped one after the other; leave out the key that asks for it"


@dataclass(frozen=True, kw_only=True)
class SteppedUnit:
    """Parameters that an optimizer steps by themselves.

    Args:
        name: Of the unit, in spans.
        parameters: Returns them; called in every step.
        then: Called as soon as they are stepped, before any other parameter is.
    """

    name: str
    parameters: Callable[[], Iterable[nn.Parameter]]
    then: Callable[[], None]


@dataclass(kw_only=True, eq=False)
class SteppedUnits:
    """Stash of the units that an optimizer steps by themselves, before the rest: `context.stash(SteppedUnits)`.

    Attributes:
        units: In the order in which they are stepped, alike on all ranks.
    """

    units: list[SteppedUnit] = field(default_factory=list)


def refused_in_units(cls: type[torch.optim.Optimizer]) -> str:
    """Return why an optimizer cannot step some parameters before others; empty where it can."""
    if steps_each_element(cls) or cls.__module__.startswith("composer3d.") or getattr(cls, "is_elementwise", False):
        return ""
    return (
        f"{cls.__name__} is not known to step every parameter by itself, and units are to be stepped one after the "
        "other; if it does, give it the attribute `is_elementwise = True`"
    )


def unit_by_unit(
    step: Callable[[Any], Any],
    *,
    asked: Callable[[], Sequence[SteppedUnit]],
    span: Callable[..., AbstractContextManager[None]],
) -> Callable[[Any], Any]:
    """Return a bare step that steps units one after the other, then all other parameters at once.

    Every element is stepped as by one step of all, with the options of its group; groups are those of the loop before
    and after it.

    Args:
        step: Without hooks, which find groups as they are.
        asked: Returns the units that are stepped by themselves; none leaves the step as it is.
        span: Opens a span.

    Raises:
        StepError: The step has written other options of a group for one unit than for another.
    """

    @functools.wraps(step)
    def stepped(optimizer: torch.optim.Optimizer) -> Any:
        units = asked()
        if not units:
            return step(optimizer)
        groups = optimizer.param_groups
        pieces = _pieces(groups, units)
        try:
            for number in range(len(units) + 1):
                unit = units[number] if number < len(units) else None
                optimizer.param_groups = [of_units[number] for of_units in pieces if number in of_units]
                with span("optimizer_unit", unit="others" if unit is None else unit.name):
                    if optimizer.param_groups:
                        step(optimizer)
                if unit is not None:
                    unit.then()
        finally:
            optimizer.param_groups = groups
        for group, of_units in zip(groups, pieces, strict=True):
            keep_written(group, list(of_units.values()), cls=type(optimizer), why=_WHY)

    return stepped


def _pieces(groups: Sequence[dict[str, Any]], units: Sequence[SteppedUnit]) -> list[dict[int, dict[str, Any]]]:
    """Return for each group what the units hold of it, by the number of the unit; of what is in none, one beyond."""
    number_of = {parameter: number for number, unit in enumerate(units) for parameter in unit.parameters()}
    found: list[dict[int, dict[str, Any]]] = []
    for group in groups:
        members: dict[int, list[Any]] = {}
        for parameter in group["params"]:
            members.setdefault(number_of.get(parameter, len(units)), []).append(parameter)
        found.append({number: {**group, "params": parameters} for number, parameters in members.items()})
    return found
