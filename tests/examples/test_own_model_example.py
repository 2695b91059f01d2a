"""A model of one's own in three dimensions: over tp alone its gradients are those of one device.

The test of its commands, which is slow, runs `composer3d verify` on all eight ranks.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.cli import main
from composer3d.runner import TABLES
from composer3d.testing import assert_parity


def test_check_accepts_it(copied, capsys):
    copied("own-model")
    assert main(["check", "run.toml"]) == 0
    assert "TENSOR       tensor_parallel.colwise  layers.[0-3].attention.query" in capsys.readouterr().out


def test_its_gradients_are_those_of_one_device(copied):
    folder = copied("own-model")
    from model import Model

    manifest = folder / "small.toml"
    manifest.write_text(
        'composer3d = 1\nextends = "run.toml"\nscheduling.pipeline = false\n'
        "mesh = { pp = 1, dp_shard = 1 }\ntrain.microbatch = 1\n"
    )
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = composer3d.Batch(args=(tokens[:, :-1],), target=tokens[:, 1:])
    assert_parity(
        lambda: Model(50, dim=16, num_layers=2),
        manifest,
        batch,
        loss_fn=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        tables=TABLES,
        own_dtype=False,
        steps=1,
    )
