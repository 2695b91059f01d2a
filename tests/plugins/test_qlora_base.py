"""Adapters that are loaded beside other weights than they were trained on, or would count otherwise."""

from __future__ import annotations

import logging

import pytest
import torch
from support.models import composed, mine, padded
from torch import nn

from composer3d import CheckpointError, torch_compat
from composer3d.testing import run_ranks

# Before ranks are forked: each of them would import it anew.
torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

TABLE = "[precision.qlora]\nrank = 4\n"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(16, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.out = nn.Linear(64, 16)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def step(path, text, load, seed=0):
    """Save after a step, or load before one; return the messages of a load."""
    told = []
    logger = logging.getLogger("composer3d_plugins.precision.qlora.frozen_base")
    logger.addFilter(lambda record: told.append(record.getMessage()))
    run = composed(f"{text}[train]\nseed = {seed}\n", Small)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    try:
        if load:
            run.load(path)
    except CheckpointError as error:
        told.append(str(error))
    else:
        with run.step(0):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        if not load:
            run.save(path)
    run.close()
    return told


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("adapters") / "step-1"
    assert run_ranks(step, 1, found, TABLE, False)[0] == []
    return found


@pytest.mark.parametrize(
    ("options", "seed", "told"),
    [
        ("", 0, []),
        ("alpha = 8\n", 0, []),
        ("", 1, ['the checkpoint\'s adapters were trained on another "tok.weight" than this run starts from']),
        (
            "alpha = 3\n",
            0,
            [
                "the checkpoint's adapters count alpha / rank = 2, and here they would count 0.75; write alpha = "
                "2 * rank in [precision.qlora]"
            ],
        ),
        (
            'quantize = "none"\n',
            0,
            ['adapters that were trained beside weights with quantize = "nf4" go on beside quantize = "none"'],
        ),
    ],
)
def test_adapters_of_another_model_are_refused_and_what_is_nearly_it_is_told(path, options, seed, told):
    found = run_ranks(step, 1, path, TABLE + options, True, seed)[0]
    if told and not told[0].startswith("adapters"):  # an error, which says where
        told = [f"{path}: {told[0]}; what was read before it is loaded: steps and saves are refused until run.load"]
        found = [found[0][: len(told[0])]]
    assert found == told
