"""A recipe of torchtune's form: the losses of one device, in as many lines as it says."""

from __future__ import annotations

from support.example_loops import assert_as_many_lines_change_as_it_says, assert_losses_are_alike


def test_losses_are_those_of_one_device(tmp_path):
    assert_losses_are_alike("recipe", tmp_path)


def test_as_many_lines_change_as_it_says():
    assert_as_many_lines_change_as_it_says("recipe")
