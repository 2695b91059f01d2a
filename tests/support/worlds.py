"""Several cases in one world: a world costs more than most of what is compared in it."""

from __future__ import annotations

from composer3d.testing import run_ranks


def in_one_world(function, world_size, *cases):
    """Call a function with the arguments of each case, on the same ranks; return by case what the ranks returned."""
    ranks = run_ranks(lambda: [function(*case) for case in cases], world_size)
    return [[found[index] for found in ranks] for index in range(len(cases))]
