"""A loop with Lightning Fabric: the losses of one device, in as many lines as it says."""

from __future__ import annotations

import pytest
from support.example_loops import assert_as_many_lines_change_as_it_says, assert_trainers_are_alike


def test_losses_are_those_of_one_device(tmp_path):
    pytest.importorskip("lightning_fabric", reason="the extra `lightning` is not installed")
    assert_trainers_are_alike("fabric", tmp_path, batch_size=8)


def test_as_many_lines_change_as_it_says():
    assert_as_many_lines_change_as_it_says("fabric")
