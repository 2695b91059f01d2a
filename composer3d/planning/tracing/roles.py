"""Which ranks of a world are worth a look: ranks that differ only in what they read do the same."""

from __future__ import annotations

from typing import Literal

from composer3d.errors import ComposerError
from composer3d.mesh import Layout, Role
from composer3d.planning.schedules.simulation import Simulation

__all__ = ["RankChoice", "chosen_ranks", "first_ranks"]

RankChoice = int | Literal["worst", "all"]


def chosen_ranks(layout: Layout, simulation: Simulation | None, choice: RankChoice) -> dict[int, int]:
    """Return the ranks to trace, and for how many ranks of the world each stands.

    Along every axis but those of stages the first rank is taken: where sizes do not divide, it holds the larger piece.

    Args:
        layout: Of the world.
        simulation: Of the pipeline, None without one.
        choice: `worst` visits one rank of each distinct role: the first and the last position of the pipeline, and of
            those between, which hold the same kind of stages, the one with most micro-batches in flight. `all` visits
            every position. A number is a rank.

    Raises:
        ComposerError: The world has no such rank.
    """
    if isinstance(choice, int):
        if choice >= layout.world_size:
            raise ComposerError(f"rank {choice} is not in a world of {layout.world_size} ranks")
        return {choice: 1}
    firsts = first_ranks(layout)
    share = layout.world_size // len(firsts)
    if choice == "all" or len(firsts) <= 3 or simulation is None:
        return dict.fromkeys(firsts, share)
    between = range(1, len(firsts) - 1)
    fullest = max(between, key=lambda position: (simulation.in_flight[position], -position))
    return {firsts[0]: share, firsts[fullest]: share * len(between), firsts[-1]: share}


def first_ranks(layout: Layout) -> list[int]:
    """Return the rank at the origin of every position along the axes of stages, in their order."""
    stride, strides = 1, {}
    for axis in reversed(layout.dense_axes):
        strides[axis.name] = stride
        stride *= layout.degrees[axis.name]
    ranks = [0]
    for name in layout.names(Role.STAGE):
        ranks = [rank + index * strides[name] for rank in ranks for index in range(layout.degrees[name])]
    return sorted(ranks)
