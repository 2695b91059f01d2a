"""A pipeline's step in time: every rank's actions in order, each as soon as what it needs is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from composer3d.errors import ComposerError
from composer3d.interfaces import Action

__all__ = ["ActionCosts", "Cell", "Costs", "Simulation", "StageCosts", "peak_held", "simulate"]


class ActionCosts(Protocol):
    """Durations of actions."""

    @property
    def transfer(self) -> float:
        """From one rank to another."""

    def seconds(self, action: Action, *, stages_per_rank: int) -> float:
        """Return what an action takes by itself."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations of actions, in any unit of time.

    Args:
        forward: Of a micro-batch through all stages of a rank; with several stages a rank each takes its part.
        backward: The same of a whole backward.
        weight: Of it the part that is the gradients of weights.
        transfer: From one rank to another: of a micro-batch's hidden state, or of its gradient.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no time.

        Raises:
            ComposerError: A cost is negative or not finite, or the part is more than the whole.
        """
        for name in ("forward", "backward", "weight", "transfer"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name in ("forward", "backward")):
                raise ComposerError(f"the {name} cost is {value:g}, which is no time that a {name} takes")
        if self.weight > self.backward:
            raise ComposerError(
                f"the weight cost {self.weight:g} is a part of the backward cost, which is only {self.backward:g}"
            )

    def of(self, kind: str) -> float:
        """Return what an action takes on all of a rank's stages together."""
        return {"F": self.forward, "B": self.backward, "W": self.weight}.get(kind, self.backward - self.weight)

    def seconds(self, action: Action, *, stages_per_rank: int) -> float:
        """Return what one of a rank's stages takes."""
        return self.of(action.kind) / stages_per_rank


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Durations of actions where stages differ: the first holds an embedding, the last the loss.

    Args:
        stages: Time by stage and kind of action.
        transfer: From one rank to another.
    """

    stages: Mapping[tuple[int, str], float]
    transfer: float = 0.0

    def seconds(self, action: Action, *, stages_per_rank: int) -> float:
        """Return what the action's stage takes, however many others its rank has."""
        return self.stages[action.stage, action.kind]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One action at its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step.

    Attributes:
        ranks: The cells of every rank, in order of time.
        stages_per_rank: Of the schedule.
        total: From the first forward to the end of the last backward.
    """

    ranks: tuple[tuple[Cell, ...], ...]
    stages_per_rank: int
    total: float

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time every rank computes: the ideal step, without waiting, of the busiest one."""
        return tuple(math.fsum(cell.end - cell.start for cell in cells) for cells in self.ranks)

    @property
    def bubble_share(self) -> float:
        """Idle time as a part of the step, over all ranks."""
        return 1.0 - math.fsum(self.busy) / (len(self.ranks) * self.total)

    @property
    def bubble_relative(self) -> float:
        """Idle time relative to the time spent computing: (p - 1) / m for GPipe and 1F1B."""
        return len(self.ranks) * self.total / math.fsum(self.busy) - 1.0

    @property
    def in_flight(self) -> tuple[float, ...]:
        """The most micro-batches whose activations a rank holds at once.

        Counted from the start of a forward to the end of the last part of its backward, each stage as its share of the
        rank; the schedule's own units where a rank has one stage.
        """
        return tuple(peak_held(cell.action for cell in cells) / self.stages_per_rank for cells in self.ranks)


def peak_held(order: Iterable[Action]) -> int:
    """Return the most activations that a rank holds at once, of a micro-batch and a stage each; no time is needed."""
    held = peak = 0
    for action in order:
        held += action.kind == "F"
        peak = max(peak, held)
        held -= action.kind in ("B", "W")
    return peak


def simulate(orders: Sequence[Sequence[Action]], costs: ActionCosts) -> Simulation:
    """Run every rank's actions in their order.

    A forward waits for the stage before; a backward for its own forward and the stage behind; the gradients of weights
    for those of the inputs. Transfers take time and keep no rank from computing.

    Args:
        orders: Actions by rank, as the hook `composer3d_actions` gives them.
        costs: What they take.

    Raises:
        ComposerError: An order waits for something that never comes.
    """
    owner = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    stages_per_rank = len(owner) // len(orders)
    done: dict[tuple[str, int, int], float] = {}
    cells: list[list[Cell]] = [[] for _ in orders]
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                ready = _ready(action, done, owner, costs)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                end = start + costs.seconds(action, stages_per_rank=stages_per_rank)
                cells[rank].append(Cell(action=action, start=start, end=end))
                done[action.kind, action.stage, action.microbatch] = clocks[rank] = end
                places[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if places[rank] < len(order):
            kind, stage, microbatch = (
                order[places[rank]].kind,
                order[places[rank]].stage,
                order[places[rank]].microbatch,
            )
            raise ComposerError(
                f"the schedule cannot run: rank {rank} waits at {kind}{microbatch} of stage {stage} for ever"
            )
    return Simulation(ranks=tuple(map(tuple, cells)), stages_per_rank=stages_per_rank, total=max(clocks))


def _ready(
    action: Action, done: dict[tuple[str, int, int], float], owner: dict[int, int], costs: ActionCosts
) -> float | None:
    """Return when all that an action needs is on its rank; None if that has not been computed yet."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "W":
        return done.get(("I", stage, microbatch))
    own = 0.0 if action.kind == "F" else done.get(("F", stage, microbatch))
    other = stage - 1 if action.kind == "F" else stage + 1
    if own is None or other not in owner:
        return own
    kinds = "F" if action.kind == "F" else "BI"
    ends = [done[kind, other, microbatch] for kind in kinds if (kind, other, microbatch) in done]
    if not ends:
        return None
    return max(own, ends[0] + (costs.transfer if owner[other] != owner[stage] else 0.0))
