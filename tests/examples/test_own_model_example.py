"""A model of one's own in three dimensions: over tp alone its gradients are those of one device.

The test of its commands, which is slow, runs `composer3d verify` on all eight ranks.
"""

from __future__ import annotations

import copy

import torch
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.cli import main
from composer3d.runner import TABLES
from composer3d.testing import assert_gradients_equal, run_ranks


def test_check_accepts_it(copied, capsys):
    copied("own-model")
    assert main(["check", "run.toml"]) == 0
    assert "TENSOR       tensor_parallel.colwise  layers.[0-3].attention.query" in capsys.readouterr().out


def loss_fn(logits, target):
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def gradients(manifest):
    """Return on a rank the gradients of a step, and those of one device."""
    from model import Model

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, tokens = Model(50, dim=16, num_layers=1), torch.randint(0, 50, (2, 9))
    reference, inputs, targets = copy.deepcopy(model), tokens[:, :-1], tokens[:, 1:]
    loss_fn(reference(inputs), targets).backward()
    run = composer3d.compose(model, manifest, loss_fn=loss_fn, tables=TABLES, example=((inputs[:1],), {}))
    with run.step(0):
        run.forward_backward(inputs, target=targets)
        found = {fqn: run.full_tensor(fqn, parameter.grad) for fqn, parameter in run.named_parameters()}
    run.close()
    return found, {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}


def test_its_gradients_are_those_of_one_device(copied):
    manifest = copied("own-model") / "small.toml"
    manifest.write_text(
        'composer3d = 1\nextends = "run.toml"\nscheduling.pipeline = false\n'
        "mesh = { pp = 1, dp_shard = 1 }\ntrain.microbatch = 1\n"
    )
    for found, wanted in run_ranks(gradients, 2, manifest):
        assert_gradients_equal(found, wanted, tolerance=1e-12)
