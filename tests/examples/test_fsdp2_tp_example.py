"""PyTorch's FSDP2 and tensor parallelism by hand: the losses of that loop, in as many lines as it says."""

from __future__ import annotations

import pytest
from support.example_loops import assert_as_many_lines_change_as_it_says, assert_losses_are_alike


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_handwritten_loop(num_ranks, tmp_path):
    assert_losses_are_alike("fsdp2-tp", tmp_path, num_ranks=num_ranks, before="handwritten")


def test_as_many_lines_change_as_it_says():
    assert_as_many_lines_change_as_it_says("fsdp2-tp", before="handwritten")
