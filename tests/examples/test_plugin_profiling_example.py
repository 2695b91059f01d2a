"""Norms of blocks as metrics: they are reported, and nothing else changes."""

from __future__ import annotations

import pytest

EXAMPLE = ("plugin-profiling", "norms_plugin", "BlockNorms")


def test_it_does_something(effect):
    assert effect(*EXAMPLE).startswith("reports largest_grad_layers.0, largest_grad_layers.1")


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
