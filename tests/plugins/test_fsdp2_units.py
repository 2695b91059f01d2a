"""Units of `fsdp2` by class name and by least size."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from support.models import Net, composed, one_step, seeded, sum_loss, unpadded
from torch import nn

from composer3d import ManifestError
from composer3d.testing import gather_full, run_ranks

TIGHT = 1e-12


def units_of(text, factory=Net):
    def planned():
        run = composed(text, seeded(factory))
        rows = {row.name: row.fqns for row in run.plan}
        run.close()
        return list(rows["fsdp2"])

    return run_ranks(planned, 1)[0]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("choice", ['unit_classes = ["Block", "Embedding"]', "unit_numel = 200"])
def test_gradients_equal_one_device(world_size, choice):
    for loss, norm, gradients, _ in run_ranks(one_step, world_size, f"[sharding.fsdp2]\n{choice}"):
        assert max(loss, norm, gradients) < TIGHT


def test_modules_of_a_class_are_units_and_the_blocks_are_not():
    assert units_of('[sharding.fsdp2]\nunit_classes = ["LayerNorm"]') == ["norm", ""]


def test_patterns_and_classes_are_units_together():
    units = units_of('[sharding.fsdp2]\nunits = ["layers.1"]\nunit_classes = ["Embedding"]')
    assert units == ["layers.1", "tok", ""]


def test_units_by_class_are_gathered_and_reduced_one_by_one():
    # Three blocks, the embedding and the root.
    for *_, counted in run_ranks(one_step, 2, '[sharding.fsdp2]\nzero = 2\nunit_classes = ["Block", "Embedding"]'):
        assert counted["all_gather", "dp_shard"] == counted["reduce_scatter", "dp_shard"] == 5


class Constant(nn.Module):
    """A block that returns a view of its own parameter, or the parameter itself."""

    def __init__(self, is_itself):
        super().__init__()
        self.value, self.is_itself = nn.Parameter(torch.linspace(-1.0, 1.0, 8)), is_itself

    def forward(self, x):
        return self.value if self.is_itself else {"added": self.value.expand_as(x)}


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.layers = nn.Embedding(11, 8), nn.ModuleList(Constant(n % 2 == 0) for n in range(4))
        self.out = nn.Linear(8, 11)
        self.double()

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            added = layer(x)
            x = x.tanh() + (added["added"] if isinstance(added, dict) else added)
        return self.out(x)


def constant_steps(text):
    def evaluated(model, tokens):
        with torch.no_grad():
            return model(tokens)

    tokens, targets = unpadded()
    tokens, targets = tokens % 11, targets % 11
    model = seeded(Constants)
    alone = evaluated(model, tokens)
    total, count = sum_loss(model(tokens), targets)
    (total / count).backward()
    run = composed(text, seeded(Constants))
    degree = run.context.data_parallel_degree
    share = len(tokens) // degree
    own = slice(run.context.rank * share, (run.context.rank + 1) * share)
    difference = (evaluated(run.model, tokens[own]) - alone[own]).abs().max()
    with run.step(0):
        run.forward_backward(tokens[own], target=targets[own])
        found = gather_full((name, p.grad) for name, p in run.named_parameters())
    run.close()
    gaps = [(found[name] - p.grad).abs().max() for name, p in model.named_parameters()]
    return float(max(difference, *gaps))


@pytest.mark.parametrize("zero", [1, 3])
def test_outputs_that_are_views_of_a_units_parameters_outlive_its_shards(zero):
    for difference in run_ranks(constant_steps, 2, f'[sharding.fsdp2]\nzero = {zero}\nunits = ["layers.*"]\n'):
        assert difference < TIGHT


class Towers(nn.Module):
    """Modules of several sizes, nested, in lists, and with attention whose parts are none by themselves."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 20), nn.Tanh()) for _ in range(3))
        self.attention = nn.MultiheadAttention(8, 2)
        self.wide = nn.Sequential(nn.Linear(8, 40), nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2)))

    def forward(self, x):
        return x


class Wrapped(nn.Module):
    """What torch's policy puts around a module."""

    def __init__(self, module):
        super().__init__()
        self.inside = module


@pytest.mark.parametrize("least", [1, 60, 200, 260, 400, 1700, 3000, 10**6])
def test_units_by_size_are_those_of_fsdp1s_policy(least):
    from composer3d_plugins.sharding.fsdp2 import _of_size
    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    model = Towers()
    ours = _of_size(model, least)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, _ = _recursive_wrap(model, policy, Wrapped, set(), set())
    names = [
        name.replace("inside.", "").removesuffix("inside").rstrip(".")
        for name, module in wrapped.named_modules()
        if isinstance(module, Wrapped)
    ]
    assert sorted(ours) == sorted(names)


def test_a_model_without_a_module_of_that_size_is_one_unit():
    assert units_of("[sharding.fsdp2]\nunit_numel = 1_000_000") == [""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'unit_classes = ["LlamaDecoderLayer"]',
            'unit_classes has "LlamaDecoderLayer", and no module is of that class; the model has Block, Dropout, '
            "Embedding, LayerNorm, Linear, ModuleList",
        ),
        (
            'units = ["norm"]\nunit_numel = 10',
            "unit_numel and units both say what is a unit; leave one of them out",
        ),
        (
            'unit_classes = ["Block"]\nunit_numel = 10',
            "unit_numel and unit_classes both say what is a unit; leave one of them out",
        ),
        ("unit_numel = 0", "unit_numel must be at least 1, not 0"),
    ],
)
def test_refusals(text, message):
    def refused():
        with pytest.raises(ManifestError) as caught:
            composed(f"[sharding.fsdp2]\n{text}\n")
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith(message)
