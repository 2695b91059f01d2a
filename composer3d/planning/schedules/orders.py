"""Orders of actions of the common pipeline schedules, for layouts that have no manifest.

Sources: Yanping Huang et al., GPipe, arXiv:1811.06965; Deepak Narayanan et al., arXiv:2104.04473 (1F1B, interleaved).
"""

from __future__ import annotations

from composer3d.interfaces import Action

__all__ = ["order_of", "orders_of"]


def orders_of(
    schedule: str, *, degree: int, num_microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return what every rank of a pipeline runs.

    Args:
        schedule: `GPipe`, `1F1B` or `Interleaved1F1B`.
        degree: Ranks.
        num_microbatches: Of a step; a multiple of the degree for the interleaved schedule.
        stages_per_rank: Above 1 for the interleaved schedule only.
    """
    return tuple(
        order_of(
            schedule,
            rank=rank,
            degree=degree,
            num_microbatches=num_microbatches,
            stages_per_rank=stages_per_rank,
        )
        for rank in range(degree)
    )


def order_of(
    schedule: str, *, rank: int, degree: int, num_microbatches: int, stages_per_rank: int = 1
) -> tuple[Action, ...]:
    """Return what one rank of a pipeline runs; arguments as `orders_of` has them."""
    total = num_microbatches * stages_per_rank
    forwards = [_place("F", step, rank, degree, stages_per_rank) for step in range(total)]
    backwards = [_place("B", step, rank, degree, stages_per_rank) for step in range(total)]
    if schedule == "GPipe":
        return (*forwards, *backwards)
    warm = degree - 1 - rank
    if stages_per_rank > 1:
        warm = 2 * warm + (stages_per_rank - 1) * degree
    warm = min(warm, total)
    order = forwards[:warm]
    for step in range(warm, total):
        order += [forwards[step], backwards[step - warm]]
    return (*order, *backwards[total - warm :])


def _place(kind: str, step: int, rank: int, degree: int, stages_per_rank: int) -> Action:
    """Return the step-th forward or backward: a rank's stages take turns of `degree` micro-batches each."""
    if stages_per_rank == 1:
        chunk, microbatch = 0, step
    else:
        turn = degree * stages_per_rank
        chunk = step % turn // degree
        microbatch = step // turn * degree + step % degree
    if kind == "F":
        return Action(stage=chunk * degree + rank, kind="F", microbatch=microbatch)
    return Action(stage=(stages_per_rank - 1 - chunk) * degree + rank, kind="B", microbatch=microbatch)
