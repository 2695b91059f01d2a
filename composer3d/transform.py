"""Phases, step points, and the one sort that orders both: order is declared here, checked here, and frozen here."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from composer3d.errors import OrderError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Phase", "StepAction", "StepPoint", "Transform", "by_point", "order", "resolve"]


class Phase(enum.IntEnum):
    """When a transform is applied. The order was found by measurement.

    Tensor parallelism before a float8 conversion fails in the first forward; recomputation wrapped before tensor
    parallelism silently disables it; FSDP2 before tensor parallelism cannot be applied; a block must be compiled after
    recomputation, so that the compiler sees it, and before FSDP2, so that it does not see the collectives.
    """

    SPLIT = 0
    CONVERT = 1
    TENSOR = 2
    RECOMPUTE = 3
    COMPILE = 4
    DATA = 5
    COMMUNICATE = 6
    MATERIALISE = 7


class StepPoint(enum.IntEnum):
    """When a step action runs inside an optimizer step."""

    BEGIN = 0
    BEFORE_MICROBATCH = 1
    AFTER_MICROBATCH = 2
    AFTER_BATCH = 3
    GRADIENTS_LOCAL = 4
    GRADIENTS_REDUCED = 5
    UNSCALED = 6
    DECIDE = 7
    BEFORE_OPTIMIZER = 8
    AFTER_OPTIMIZER = 9
    PARAMETERS_SYNCHRONISED = 10
    PARAMETERS_FINAL = 11
    END = 12


@dataclass(frozen=True, kw_only=True)
class Transform:
    """One change of the model, declared before it is made.

    Args:
        name: Unique in a composition; the plugin's name where a plugin has one transform.
        phase: When it is applied.
        select: Pure; called once with the whole model on meta and the context, returns the FQNs it will touch. An empty
            answer is an error, unless `may_be_empty`.
        apply: Called once a part with the part's module, the selected FQNs that the part holds, and the context. It
            changes the module in place and returns the FQNs it touched.
        uses: Axes it communicates over.
        averages: Axes over which it takes the mean of gradients; the core multiplies the loss to undo it.
        requires: Names of transforms that must be present, each with the reason shown to the user.
        conflicts: Names of transforms that must be absent, each with the reason shown to the user.
        after: Names of transforms of the same phase that come first, where present.
        before: Names of transforms of the same phase that come later, where present.
        rows: Returns, after `select`, the plan's rows for the selected modules: FQNs by label, one row of the plan
            each, named `name.label`.
        own_units: Data-parallel plugins take each of the selected modules as a unit of its own, beside those they were
            told; only in phases before DATA.
        may_be_empty: Where it selects nothing it is left out: what it does is for some models only, and nobody asks for
            it by name.
    """

    name: str
    phase: Phase
    select: Callable[[nn.Module, Any], Sequence[str]]
    apply: Callable[[nn.Module, Sequence[str], Any], Sequence[str]]
    uses: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    requires: Mapping[str, str] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    rows: Callable[[Any], Mapping[str, Sequence[str]]] | None = None
    own_units: bool = False
    may_be_empty: bool = False


@dataclass(frozen=True, kw_only=True)
class StepAction:
    """Something a plugin does at one point of every step.

    Args:
        name: Unique in a composition.
        point: When it runs.
        run: Called with the step's `StepState`. At `DECIDE` a returned string vetoes the optimizer step, with that
            reason, on all ranks; elsewhere the result is ignored.
        after: Names of actions at the same point that come first, where present.
        before: Names of actions at the same point that come later, where present.
        gradients: Between backward and optimizer: whether it needs the gradients to be there, or can stop the step. One
            that needs them cannot be in a run whose optimizer steps in the backward.
    """

    name: str
    point: StepPoint
    run: Callable[[Any], str | None]
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    gradients: bool = True


class Ordered(Protocol):
    """Attributes of an item that `order` needs."""

    @property
    def name(self) -> str:
        """The unique name."""

    @property
    def after(self) -> tuple[str, ...]:
        """Names that come first."""

    @property
    def before(self) -> tuple[str, ...]:
        """Names that come later."""


T = TypeVar("T", bound=Ordered)


def _place(item: Any) -> int:
    return int(item.phase if hasattr(item, "phase") else item.point)


def by_point(actions: Iterable[StepAction]) -> dict[StepPoint, tuple[StepAction, ...]]:
    """Return the actions of every point of a step, in the order given."""
    found = tuple(actions)
    return {point: tuple(action for action in found if action.point is point) for point in StepPoint}


def order(items: Iterable[T]) -> tuple[T, ...]:
    """Sort transforms or step actions by phase or point, then after/before, then name.

    The result does not depend on the order of `items`.

    Raises:
        OrderError: Two items share a name, a constraint crosses phases backwards, or constraints form a cycle.
    """
    by_name: dict[str, T] = {}
    for item in items:
        if item.name in by_name:
            raise OrderError(f'two plugins declare "{item.name}"; names must differ')
        by_name[item.name] = item
    result: list[T] = []
    for place in sorted({_place(item) for item in by_name.values()}):
        result += _order_within({name: item for name, item in by_name.items() if _place(item) == place}, by_name)
    return tuple(result)


def _order_within(group: Mapping[str, T], everything: Mapping[str, T]) -> list[T]:
    """Kahn's algorithm that always takes the alphabetically first item that is ready."""
    sorter: TopologicalSorter[str] = TopologicalSorter({name: () for name in group})
    for name, item in group.items():
        for first, second in [(other, name) for other in item.after] + [(name, other) for other in item.before]:
            if first in group and second in group:
                sorter.add(second, first)
            elif (
                first in everything and second in everything and _place(everything[first]) > _place(everything[second])
            ):
                raise OrderError(f'"{first}" cannot come before "{second}": its phase is later')
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(f'"{name}"' for name in error.args[1])
        raise OrderError(f"these cannot be ordered: {cycle}") from None
    ready: list[str] = []
    result: list[T] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        name = ready.pop(0)
        sorter.done(name)
        result.append(group[name])
    return result


def resolve(transforms: Iterable[Transform], *, alone: bool = False) -> tuple[Transform, ...]:
    """Order transforms after checking what they require and exclude.

    Args:
        transforms: Of all plugins.
        alone: Whether they are those of the reference on one device, from which required transforms have been removed.

    Raises:
        OrderError: With the reason given by the plugin that has it.
    """
    ordered = order(transforms)
    names = {transform.name for transform in ordered}
    for transform in ordered:
        for other, reason in transform.requires.items():
            if other not in names and not alone:
                raise OrderError(f'"{transform.name}" requires "{other}", which the manifest does not have: {reason}')
        for other, reason in transform.conflicts.items():
            if other in names:
                raise OrderError(f'"{transform.name}" cannot be combined with "{other}": {reason}')
    return ordered
