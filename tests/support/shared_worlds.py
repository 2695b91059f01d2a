"""Several cases in one process group, whose start costs more than most cases."""

from __future__ import annotations

import pytest

from composer3d.testing import run_ranks


def in_one_world(function, world_size, *cases):
    """Call a function with the arguments of each case, on the same ranks; return by case what the ranks returned."""
    ranks = run_ranks(lambda: [function(*case) for case in cases], world_size)
    return [[found[index] for found in ranks] for index in range(len(cases))]


def by_world_size(layouts):
    """Return parameters of (world size, texts), one for all layouts of a size; those with marks stay by themselves."""
    together, alone = {}, []
    for world_size, text, name, marks in [(*param.values, param.id, param.marks) for param in layouts]:
        if marks:
            alone.append(pytest.param(world_size, [text], id=name, marks=marks))
        else:
            together.setdefault(world_size, []).append(text)
    return [*(pytest.param(size, texts, id=f"{size} ranks") for size, texts in together.items()), *alone]
