from __future__ import annotations

import pytest
from torch import distributed as dist

from composer3d.checkpoint.joint_failure import together
from composer3d.errors import CheckpointError
from composer3d.processes.json_exchange import all_gather_json
from composer3d.testing import run_ranks


def act(failing, text):
    rank = dist.get_rank() if dist.is_initialized() else 0

    def work():
        if rank in failing:
            raise ValueError(text.format(rank=rank))
        return rank * 10

    try:
        return together(None, "here", work), all_gather_json(rank)
    except CheckpointError as error:
        return str(error), isinstance(error.__cause__, ValueError)


def test_results_are_each_ranks_own():
    assert run_ranks(act, 3, (), "") == [(0, [0, 1, 2]), (10, [0, 1, 2]), (20, [0, 1, 2])]


@pytest.mark.parametrize(
    ("failing", "text", "message"),
    [
        ((1,), "bad", "here: rank 1: ValueError: bad"),
        ((0, 1, 2), "bad", "here: ValueError: bad"),
        ((0, 2), "bad {rank}", "here: rank 0: ValueError: bad 0; rank 2: ValueError: bad 2"),
    ],
)
def test_all_ranks_raise_the_same(failing, text, message):
    assert run_ranks(act, 3, failing, text) == [(message, rank in failing) for rank in range(3)]


def test_many_failures_are_counted():
    expected = "here: rank 0: ValueError: 0; rank 1: ValueError: 1; rank 2: ValueError: 2; and 2 more ranks"
    assert run_ranks(act, 5, range(5), "{rank}")[4] == (expected, True)


def test_without_a_process_group():
    assert act((), "") == (0, [0])
    assert act((0,), "alone") == ("here: ValueError: alone", True)
