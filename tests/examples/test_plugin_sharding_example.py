"""Data parallelism as a plugin of one's own: one device's gradients, and every heading of the conformance suite."""

from __future__ import annotations

import pytest

EXAMPLE = ("plugin-sharding", "averaging_plugin", "ReplicasAveraged")


def test_it_does_something(effect):
    assert effect(*EXAMPLE) == "communicates: all_reduce over dp_replicate"


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
