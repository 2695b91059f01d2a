"""What a layout cannot keep of what hangs on parameters: `check` says it, before any rank starts."""

from __future__ import annotations

import pytest

BASE = """\
composer3d = 1
model.use = "hanging:{factory}"
model.blocks = "layers.*"
data.use = "text.txt"
train = {{ steps = 2, global_batch = 4, microbatch = 1 }}
run.device = "cpu"
mesh = {{ {mesh} }}
"""
FSDP = "[sharding.fsdp2]\n"
PIPELINE = "[scheduling.pipeline]\n"

MODELS = """\
import torch
from cli_models import build
from torch import nn


class Marked(nn.Parameter):
    pass


def plain(vocab_size):
    return build(dim=8, num_layers=4, vocab_size=vocab_size)


def listed(vocab_size):
    model = plain(vocab_size)
    model.shared = {"rows": [model.embedding.weight]}
    return model


def enclosed(vocab_size):
    model = plain(vocab_size)
    weight = model.layers[0].weight

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x + x @ weight)

    model.head = Head(8, vocab_size)
    return model


def classed(vocab_size):
    model = plain(vocab_size)
    model.layers[3].weight = Marked(torch.randn(8, 8))
    return model


def masked(vocab_size):
    model = plain(vocab_size)
    model.layers[0].weight.mask = torch.ones(8, 8)
    return model
"""
HELD = (
    '"{path}" holds the parameter "{fqn}" itself, which this layout replaces: computing with it would use old values '
    "and lose gradients; read it from its module in every forward"
)
CLASS = (
    '"layers.3.weight" is a Marked, a subclass of nn.Parameter, and this layout replaces it by a sharded one, which '
    "cannot be of that class; mark parameters by an attribute, which is carried over"
)
MASK = (
    '"layers.0.weight" has an attribute "mask" that is a tensor of shape (8, 8), and this layout trains shards of the '
    "parameter; register the tensor as a buffer of the module"
)


@pytest.mark.parametrize(
    ("factory", "mesh", "tables", "message"),
    [
        ("plain", "dp_shard = 2", FSDP, None),
        ("listed", "dp_shard = 2", FSDP, HELD.format(path="shared['rows'][0]", fqn="embedding.weight")),
        ("listed", "pp = 2", PIPELINE, None),
        ("enclosed", "dp_shard = 2", FSDP, HELD.format(path="head.forward.weight", fqn="layers.0.weight")),
        ("classed", "dp_shard = 2", FSDP, CLASS),
        # The last stage's; rank 0 has the first.
        ("classed", "pp = 2, dp_shard = 2", PIPELINE + FSDP, CLASS),
        ("masked", "dp_shard = 2", FSDP, MASK),
    ],
)
def test_check_says_what_compose_would_refuse(factory, mesh, tables, message, folder, command):
    (folder / "hanging.py").write_text(MODELS)
    (folder / "run.toml").write_text(BASE.format(factory=factory, mesh=mesh) + tables)
    code, out, err = command("check", "run.toml")
    if message is None:
        assert code == 0, err
    else:
        assert code == 2
        assert err.splitlines()[0] == f"run.toml:2:7: [model] {message}"
