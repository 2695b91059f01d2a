"""Gradients clipped by a moving average: it clips, and its state is saved."""

from __future__ import annotations

import pytest

EXAMPLE = ("plugin-precision", "clip_plugin", "MovingClip")


def test_it_does_something(effect):
    assert effect(*EXAMPLE, factor=0.5).startswith("changes")


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
