"""Hooks of the whole model, on its output and on what a loop keeps, and retained gradients, are one device's."""

from __future__ import annotations

import pytest
from support.late_hooks import PREPARED, errors

from composer3d.testing import run_ranks

TIGHT = 1e-12
LAYOUTS = {"fsdp2": "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n", "ddp": "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_from_the_first_step_on_in_a_loop_and_in_the_engine(layout: str):
    for found in run_ranks(errors, 2, list(PREPARED), LAYOUTS[layout]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def late(text: str) -> dict[str, float]:
    return errors(["before the model", "after the model", "its output"], text, late=True)


def test_they_are_where_they_are_registered_on_the_composed_model():
    for found in run_ranks(late, 2, LAYOUTS["fsdp2"]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}
