"""Recomputed blocks and vetoed steps: a plugin of scheduling conforms, and a limit skips steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import full, run_ranks

EXAMPLE = ("plugin-scheduling", "steps_plugin", "CarefulSteps")


def test_it_votes(effect):
    assert effect(*EXAMPLE, every=1) == "changes collectives"


def weights_after_a_step(manifest):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = composer3d.compose(model, manifest, loss_fn=mse_loss)
    optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
    before = [full(parameter.detach()).clone() for parameter in model.parameters()]
    with run.step(0):
        run.forward_backward(torch.ones(2, 4), target=torch.zeros(2, 4))
        optimizer.step()
    after = [full(parameter.detach()).clone() for parameter in model.parameters()]
    run.close()
    return [torch.equal(one, other) for one, other in zip(before, after, strict=True)]


@pytest.mark.parametrize(("limit", "is_skipped"), [(1e-9, True), (100.0, False)])
def test_a_step_with_a_large_gradient_is_skipped_on_all_ranks(copied, limit, is_skipped):
    manifest = copied("plugin-scheduling") / "small.toml"
    table = f'[scheduling.careful_steps]\nuse = "steps_plugin:CarefulSteps"\nlimit = {limit}\n'
    manifest.write_text(f"composer3d = 1\nmodel.blocks = '*'\n[sharding.fsdp2]\n{table}")
    assert run_ranks(weights_after_a_step, 2, manifest) == [[is_skipped] * 4] * 2


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
