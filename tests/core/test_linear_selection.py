"""Which linear layers precision plugins take where the manifest names none."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.models import composed
from torch import nn

from composer3d import ManifestError
from composer3d.models import llama
from composer3d.testing import run_ranks


class Strange(nn.Module):
    """Blocks without a linear layer that fits, as those of GPT-2 in transformers, and a head that does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.head = nn.Linear(32, 32)


def found(text):
    try:
        composition = composed(text, Strange())
    except ManifestError as error:
        return str(error).partition("run.toml")[2]
    chosen = [fqn for row in composition.plan if row.phase == "CONVERT" for fqn in row.fqns]
    composition.close()
    return chosen


@pytest.mark.parametrize(("plugin", "multiple"), [("float8", 16), ("int8", 16), ("mxfp8", 32), ("qat", 32)])
def test_blocks_that_are_left_as_they_are_unless_the_rest_is_named(plugin, multiple):
    table = f"[precision.{plugin}]\n"
    assert run_ranks(found, 1, table)[0] == (
        f':2:12: [precision.{plugin}] nothing in the blocks "layers.*" would be converted: they have no linear layer '
        f'of torch with sizes that are multiples of {multiple}; if the rest is meant, write modules = ["head"]'
    )
    assert run_ranks(found, 1, table + 'modules = ["head"]\n')[0] == ["head"]
    assert run_ranks(found, 1, table + 'exclude = ["layers"]\n')[0] == ["head"]


def step(text):
    model = partial(llama, dim=32, num_layers=1, num_heads=2, vocab_size=32)
    run = composed(text + "[sharding.fsdp2]\n", model)
    tokens = torch.arange(32)[None]
    with run.step(0):
        loss = run.forward_backward(tokens, target=tokens)
    run.close()
    return float(loss)


@pytest.mark.parametrize("plugin", ["float8", "int8", "mxfp8", "qat"])
def test_heads_hand_out_no_views(plugin):
    # FSDP2 would warn, and warnings are errors.
    assert 0 < run_ranks(step, 1, f"[precision.{plugin}]\n")[0] < 10
