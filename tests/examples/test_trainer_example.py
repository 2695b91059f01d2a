"""A program with transformers' Trainer: the losses of one device, in as many lines as it says."""

from __future__ import annotations

import pytest
from support.example_loops import assert_as_many_lines_change_as_it_says, assert_trainers_are_alike


@pytest.mark.slow
def test_losses_are_those_of_one_device(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    assert_trainers_are_alike("trainer", tmp_path, batch_size=4, at_most=2e-6)  # in which the Trainer keeps losses


def test_as_many_lines_change_as_it_says():
    assert_as_many_lines_change_as_it_says("trainer")
