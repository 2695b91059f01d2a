"""Stage boundaries: stages that take equally long, and among those the ones that need the least memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Load", "balance", "peak_in_flight"]

# Of a stage, the index of its first block, and that after its last.
_Of = Callable[[int, int, int], float]
# A parameter has its weight, its gradient, and two moments of the optimizer.
_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """Compute and memory of the model's blocks, from which stages are balanced.

    Args:
        costs: Floating-point operations of every block.
        first_cost: Floating-point operations of embeddings, which the first stage runs.
        last_cost: Floating-point operations of norm and head, which the last stage runs.
        parameters_bytes: Of every block; those of embeddings belong to the first, those of norm and head to the last.
        activations_bytes: Bytes of every block's results in a forward: about what it keeps for its backward.
    """

    costs: Sequence[float]
    first_cost: float = 0.0
    last_cost: float = 0.0
    parameters_bytes: Sequence[float] = ()
    activations_bytes: Sequence[float] = ()

    def costliest(self, starts: Sequence[int]) -> float:
        """Return the fraction of the whole cost that falls to the costliest of the stages beginning at `starts`."""
        stages = [sum(self.costs[start:end]) for start, end in itertools.pairwise((*starts, len(self.costs)))]
        stages[0] += self.first_cost
        stages[-1] += self.last_cost
        return max(stages) / max(sum(stages), 1.0)


def peak_in_flight(actions: Iterable[tuple[int, str, int]], num_stages: int) -> list[int]:
    """Return, by stage, the peak number of micro-batches whose activations it holds.

    Args:
        actions: Of all ranks, each rank's in its order, as (stage, kind, micro-batch).
        num_stages: Stages of the pipeline.
    """
    held, peak = [0] * num_stages, [0] * num_stages
    for stage, kind, _ in actions:
        held[stage] += (kind == "F") - (kind in ("B", "W"))
        peak[stage] = max(peak[stage], held[stage])
    return peak


def balance(load: Load, *, num_stages: int, in_flight: Sequence[int] = ()) -> list[int]:
    """Divide blocks into stages of at least one.

    The costliest stage is as cheap as can be, since all others wait for it. Of the splits of that cost, the stage that
    needs most memory needs as little as can be: weights, gradients and optimizer states, and activations times the
    micro-batches that are in flight there, more on earlier stages under 1F1B. Of these, the costs' sum of squares is
    the smallest.

    Args:
        load: Costs and bytes of the model.
        num_stages: At most the number of blocks.
        in_flight: Micro-batches in flight, by stage; none leaves memory out.

    Returns:
        The index of every stage's first block.
    """
    num_blocks = len(load.costs)
    before = _sums(load.costs)
    weights = _sums(load.parameters_bytes or [0.0] * num_blocks)
    activations = _sums(load.activations_bytes or [0.0] * num_blocks)

    def cost(stage: int, start: int, end: int) -> float:
        extra = (load.first_cost if stage == 0 else 0.0) + (load.last_cost if stage == num_stages - 1 else 0.0)
        return before[end] - before[start] + extra

    def memory(stage: int, start: int, end: int) -> float:
        held = in_flight[stage] * (activations[end] - activations[start])
        return _COPIES * (weights[end] - weights[start]) + held

    def solve(value: _Of, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
        return _best(num_blocks, num_stages, value, join, lambda *stage: all(limit(*stage) for limit in limits))

    limits: list[Callable[[int, int, int], bool]] = []
    slowest, _ = solve(cost, max)
    limits.append(lambda *stage: cost(*stage) <= slowest)
    if in_flight:
        fullest, _ = solve(memory, max)
        limits.append(lambda *stage: memory(*stage) <= fullest)
    return solve(lambda *stage: cost(*stage) ** 2, lambda total, square: total + square)[1]


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *itertools.accumulate(values)]


def _best(
    num_blocks: int,
    num_stages: int,
    value: _Of,
    join: Callable[[float, float], float],
    allowed: Callable[[int, int, int], bool],
) -> tuple[float, list[int]]:
    """Return the least joined value over all allowed splits, and the split, by dynamic programming over stages."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        ends = range(stage + 1, num_blocks - (num_stages - stage - 1) + 1)
        for start, (total, starts) in best.items():
            for end in ends if stage < num_stages - 1 else (num_blocks,):
                if end > start and allowed(stage, start, end):
                    candidate = (join(total, value(stage, start, end)), [*starts, start])
                    if end not in following or candidate < following[end]:
                        following[end] = candidate
        best = following
    return best[num_blocks]
