"""Representative ranks of a world: ranks that differ only in the samples that they read are traced once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Literal

from composer3d import patterns
from composer3d.errors import ArgumentError, TransformError
from composer3d.mesh import Layout, Role
from composer3d.planning.schedules.planned_stages import StageForms
from composer3d.planning.schedules.simulation import Simulation
from composer3d.planning.tracing.equal_blocks import prefixes, treatments

if TYPE_CHECKING:
    from composer3d.composition import Preparation

__all__ = ["Contents", "RankChoice", "chosen_ranks", "contents_of", "first_ranks"]

RankChoice = int | Literal["worst", "all"]
# Parameters of a position's stages: their number by name, without the block's number, form, and what transforms select
# of their block: a stage whose blocks are recomputed does not exceed one whose blocks are not. And, as far as the split
# knows them, the values that the stages receive and send, and the costs of their calls.
Contents = Counter[Hashable]


def chosen_ranks(
    layout: Layout, simulation: Simulation | None, choice: RankChoice, contents: Sequence[Contents] = ()
) -> dict[int, int]:
    """Return the ranks to trace, and the number of ranks of the world that each represents.

    Along every axis but those of stages the first rank is taken: where sizes do not divide, it holds the larger piece.

    Args:
        layout: Axes and degrees.
        simulation: Of the pipeline's schedule; None without a pipeline.
        choice: `worst` visits one rank of each distinct role: the first and the last position of the pipeline, and of
            those between every one that no other exceeds, in the parameters of its stages and in its micro-batches in
            flight: it represents those that it exceeds. `all` visits every position. A number is a rank.
        contents: From `contents_of`; without them all positions between count as equal.

    Raises:
        ArgumentError: The world has no such rank.
    """
    if isinstance(choice, int):
        if choice >= layout.world_size:
            size = layout.world_size
            raise ArgumentError("rank", f"it is not in a world of {size} rank{'s' * (size > 1)}", value=choice)
        return {choice: 1}
    firsts = first_ranks(layout)
    share = layout.world_size // len(firsts)
    if choice == "all" or len(firsts) <= 3 or simulation is None:
        return dict.fromkeys(firsts, share)
    in_flight = simulation.in_flight
    chosen = {0: 1}
    for position in sorted(range(1, len(firsts) - 1), key=lambda position: -in_flight[position]):
        above = [
            other
            for other in chosen
            if other and (not contents or contents[position] <= contents[other])  # they have more in flight, or as many
        ]
        if above:
            equal = [other for other in above if not contents or contents[position] == contents[other]]
            chosen[(equal or above)[0]] += 1
        else:
            chosen[position] = 1
    chosen[len(firsts) - 1] = 1
    return {firsts[position]: share * number for position, number in sorted(chosen.items())}


def contents_of(preparation: Preparation) -> list[Contents]:
    """Return the parameters of every position's stages; empty for a pipeline without positions between.

    Memory: none; stages of a model on meta. Collectives: none.
    """
    from composer3d.planning.tracing.fake_composition import planned

    context = preparation.context
    firsts = first_ranks(context.layout)
    if len(firsts) <= 3:
        return []
    found: list[Contents] = []
    treated = _treatment(preparation)
    forms = context.stash(StageForms)
    for rank in firsts:
        with context.as_rank(rank), planned(context):
            split = preparation.hooks.split(context, preparation.model)
            if split is None:
                return []
            found.append(
                Counter(
                    (re.sub(r"[.][0-9]+[.]", ".*.", fqn), tuple(parameter.shape), parameter.dtype, treated(fqn))
                    for part in split.parts
                    for fqn, parameter in part.module.named_parameters()
                )
                + sum((forms.around(part.index) + forms.costs(part.index) for part in split.parts), Counter())
            )
    return found


def _treatment(preparation: Preparation) -> Callable[[str], Hashable]:
    """Return what gives, of a parameter's FQN, what every transform selects of its block, or whether it selects it."""
    context = preparation.context
    try:
        blocks = patterns.select(context.blocks, context.fqns)
    except TransformError:  # no single list of equal blocks
        blocks = []
    by_block = dict(zip(blocks, treatments(preparation, blocks), strict=True))
    selected = [frozenset(fqns) for _, fqns in preparation.selected]

    def of(fqn: str) -> Hashable:
        names = prefixes(fqn)
        owner = next((name for name in names if name in by_block), None)
        return tuple(not each.isdisjoint(names) for each in selected) if owner is None else by_block[owner]

    return of


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
