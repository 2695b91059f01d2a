"""Control numbers: what ranks send and receive is what was given, whatever was exchanged before in the same memory."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from composer3d.step.control_numbers import ControlNumbers
from composer3d.testing import run_ranks


def exchanged():
    """Return what a rank receives: longer and shorter vectors in turn, of both dtypes."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    whole = ControlNumbers(dtype=torch.int64, device=cpu, group=None)
    real = ControlNumbers(dtype=torch.float64, device=cpu, group=None)
    first = whole.all_reduce([rank + 1, 2, 3])
    return [
        first,
        whole.all_reduce([rank == 1], takes_maximum=True),
        whole.all_reduce([1 << 61, rank, 7, 8, 9]),
        whole.all_reduce([rank, 5, 6]),
        real.all_gather([rank + 0.5, math.inf], num_ranks=2),
        real.all_gather([rank + 0.25], num_ranks=2),
        real.all_gather([rank + 0.5, -1.0], num_ranks=2),
        first,
    ]


def test_numbers_of_every_length_arrive_and_what_was_received_stays():
    assert (
        run_ranks(exchanged, 2)
        == [
            [
                [3, 4, 6],
                [1],
                [1 << 62, 1, 14, 16, 18],
                [1, 10, 12],
                [0.5, math.inf, 1.5, math.inf],
                [0.25, 1.25],
                [0.5, -1.0, 1.5, -1.0],
                [3, 4, 6],
            ]
        ]
        * 2
    )
