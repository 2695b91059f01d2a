"""Pipelines: hooks of the whole model, and of modules around its blocks, are called once, with its output."""

from __future__ import annotations

import pytest
from support.root_hooks import HOOKS, errors

from composer3d.testing import run_ranks

TIGHT = 1e-12
STAGES = "mesh.pp = 2\ntrain.microbatch = 1\n[sharding.fsdp2]\n[scheduling.pipeline]\n"


def found(text: str) -> dict[str, float]:
    return errors([name for name in HOOKS if name != "kept"], text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(STAGES, id="1F1B"),
        pytest.param(f"{STAGES}split = {{ tracer = ['body.blocks.1'] }}\n", id="traced", marks=pytest.mark.slow),
    ],
)
def test_they_are_called_once_with_the_models_output(text: str):
    for each in run_ranks(found, 2, text):
        assert not {name: error for name, error in each.items() if not error < TIGHT}
