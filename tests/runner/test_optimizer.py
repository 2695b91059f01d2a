from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.training import MANIFEST, start, write

from composer3d import checkpoint
from composer3d.errors import ManifestError, RankError
from composer3d.manifest import read_text, type_manifest
from composer3d.runner import TABLES
from composer3d.runner.objective.optimizer_groups import describe_groups, optimizer_class
from composer3d.runner.runner_tables import OptimizerGroupTable, OptimizerTable
from composer3d.testing import run_ranks

NUM_DIMS = {"tok.weight": 2, "layers.0.up.weight": 2, "layers.0.up.bias": 1, "norm.weight": 1}


def members(table):
    """Return the weight decay and learning rate of every parameter, as the first group that matches decides."""
    _, defaults = optimizer_class(table, Path())
    groups = [*describe_groups(table, NUM_DIMS, defaults), {"match": ""}]
    first = {fqn: next(group for group in groups if re.search(group["match"], fqn)) for fqn in NUM_DIMS}
    return {fqn: (group.get("weight_decay", "usual"), group.get("lr", "usual")) for fqn, group in first.items()}


def test_norms_and_biases_are_not_decayed():
    assert members(OptimizerTable()) == {
        "tok.weight": ("usual", "usual"),
        "layers.0.up.weight": ("usual", "usual"),
        "layers.0.up.bias": (0.0, "usual"),
        "norm.weight": (0.0, "usual"),
    }


def test_a_group_keeps_norms_and_biases_undecayed_unless_it_says_so():
    groups = (OptimizerGroupTable(match="layers", lr=1.0), OptimizerGroupTable(match="^norm", weight_decay=0.5))
    assert members(OptimizerTable(groups=groups)) == {
        "tok.weight": ("usual", "usual"),
        "layers.0.up.weight": ("usual", 1.0),
        "layers.0.up.bias": (0.0, 1.0),
        "norm.weight": (0.5, "usual"),
    }


def test_a_pattern_may_say_what_is_not_decayed():
    decays = {fqn: decay for fqn, (decay, _) in members(OptimizerTable(no_decay="tok")).items()}
    assert decays == dict.fromkeys(NUM_DIMS, "usual") | {"tok.weight": 0.0}


def test_classes_have_their_arguments():
    cls, arguments = optimizer_class(OptimizerTable(), Path())
    assert cls is torch.optim.AdamW and arguments["fused"] and arguments["weight_decay"] == 0.1
    cls, arguments = optimizer_class(OptimizerTable(use="sgd", lr=1.0, momentum=0.5), Path())
    assert cls is torch.optim.SGD
    assert arguments == {"lr": 1.0, "momentum": 0.5, "foreach": True, "weight_decay": 0.0}
    cls, arguments = optimizer_class(OptimizerTable(use="torch.optim:RMSprop", args={"alpha": 0.5}), Path())
    assert cls is torch.optim.RMSprop and arguments["alpha"] == 0.5


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            'use = "sgd"\nbetas = [0.1, 0.2]',
            5,
            'betas is for use = "adamw"; write args = { betas = ... } for another class',
        ),
        ('use = "adam"', 4, 'use = "adam" is not adamw, sgd, muon or "module:Class"; write "torch.optim:Adam"'),
        (
            'no_decay = "("',
            4,
            'no_decay = "(" is not a regular expression: missing ), unterminated subpattern at position 0',
        ),
    ],
)
def test_keys_that_mean_nothing_are_refused(text, line, message):
    document = read_text(f"composer3d = 1\ntrain.steps = 1\n[optimizer]\n{text}\n")
    with pytest.raises(ManifestError) as caught:
        type_manifest(document, tables=TABLES)
    assert str(caught.value) == f"<text>:{line}:1: [optimizer] {message}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['optimizer.groups=[{match="nowhere"}]'], r'\[optimizer\] the pattern "nowhere" matches nothing in the model'),
        (
            ['optimizer.groups=[{match="tok", args={beta=1}}]'],
            r'\[optimizer\] AdamW has no hyperparameter "beta"; it has lr',
        ),
        (['optimizer.no_decay="nowhere"'], r'\[optimizer\] the pattern "nowhere" matches nothing in the model'),
        (
            ['optimizer.use="torch.optim:Adamm"'],
            r'\[optimizer\] module "torch.optim" has no "Adamm"; did you mean "Adam"',
        ),
        (["optimizer.args={beta=1}"], r'\[optimizer\] AdamW takes no argument "beta"; it takes params, lr'),
        (['train.frozen=["nowhere"]'], r'\[train\] the pattern "nowhere" matches nothing in the model'),
        (['train.frozen=["**"]'], r"\[train\] frozen leaves no parameter to train"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path, overrides, message):
    with pytest.raises(RankError, match="ManifestError: .*" + message):
        start(write(tmp_path), 1, "train.steps=1", *overrides)


def saved_tensors(folder):
    keys = [key for key in checkpoint.contents(folder) if key.startswith("model/")]
    return {key: tensor.clone() for key, tensor in checkpoint.read_tensors(folder, keys)}


@pytest.mark.parametrize("plugin", ["[sharding.fsdp2]", "[sharding.ddp]"])
def test_frozen_parameters_stay_and_the_others_learn(tmp_path, plugin):
    path = write(tmp_path, MANIFEST.replace("[sharding.fsdp2]", plugin))
    frozen = 'train.frozen=["layers.0", "tok_embeddings", "layers.1.*_norm.weight"]'
    start(path, 2, frozen, "train.steps=2", "checkpoint.every=1", "lr_schedule.use=constant")
    [changed] = run_ranks(changed_between, 1, tmp_path / "out" / "checkpoints")
    parts = ("attention.wk", "attention.wo", "attention.wq", "attention.wv", "feed_forward.w1", "feed_forward.w2")
    inside = [f"layers.1.{name}.weight" for name in (*parts, "feed_forward.w3")]
    assert sorted(changed) == sorted([*inside, "norm.weight", "output.weight"])


def changed_between(folder):
    """Return the parameters that differ between the first and the second checkpoint."""
    first, second = (saved_tensors(folder / f"step-{step}") for step in (1, 2))
    return [key.removeprefix("model/") for key in first if not torch.equal(first[key], second[key])]
