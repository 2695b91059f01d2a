"""A vision model: `check` accepts it, and its gradients are those of one device."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.cli import main
from composer3d.runner import TABLES
from composer3d.testing import assert_parity


def test_check_accepts_it(copied, capsys):
    copied("vision")
    assert main(["check", "run.toml"]) == 0
    assert "DATA         fsdp2                    layers.[0-1], (root)" in capsys.readouterr().out


def test_its_gradients_are_those_of_one_device(copied):
    folder = copied("vision")
    from vision import Classifier, stripes

    images, labels = stripes(8, 8).tensors
    assert_parity(
        lambda: Classifier(4, width=8, num_layers=1),
        folder / "run.toml",
        composer3d.Batch(args=(images.to(torch.float32),), target=labels),
        loss_fn=cross_entropy,
        tables=TABLES,
        microbatch=2,
        own_dtype=False,
        steps=1,
    )
