"""Blocks are alike only where all their attributes are equal by value, whatever kinds of objects hold these."""

from __future__ import annotations

import functools
import types

import pytest
from torch import nn

from composer3d import plan
from composer3d.planning.tracing.equal_blocks import form_of

MODEL = """
from torch import nn


class Options:
    pass


class Block(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.options = Options()
        self.options.times = times

    def forward(self, x):
        for _ in range(self.options.times):
            x = self.mix(x).relu()
        return x


class Model(nn.Module):
    def __init__(self, vocab_size, most):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.layers = nn.ModuleList(Block(1 + number % most) for number in range(8))
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def test_blocks_that_differ_in_an_object_are_all_traced(tmp_path, monkeypatch):
    module = f"unlike_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODEL)
    path = tmp_path / "run.toml"
    path.write_text(
        f'composer3d = 1\n[model]\nuse = "{module}:Model"\nargs.most = 2\n[data]\nuse = "synthetic"\n'
        "vocab_size = 64\nseq_len = 8\n[train]\nsteps = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER3D_TRACES", "off")

    def traced(**asked):
        (rank,) = plan(str(path), **asked).plan.ranks
        return rank.trace

    found, full = traced(), traced(full=True)
    assert found == full and not found.is_extrapolated
    assert traced(overrides=["model.args.most=1"]).is_extrapolated


def made(factor):
    class Scaled(nn.Module):
        def forward(self, x):
            return x * factor

    return Scaled()


def scaled(x, factor):
    return x * factor


def with_attribute(value):
    block = nn.Linear(2, 2)
    block.kept, block.layer_idx = value, id(block)
    return block


KINDS = {
    "a dict": lambda number: with_attribute({"depth": [number]}),
    "an object": lambda number: with_attribute(types.SimpleNamespace(number=number)),
    "a partial": lambda number: with_attribute(functools.partial(scaled, factor=number)),
    "a function": lambda number: with_attribute(lambda x: x * number),
    "a set": lambda number: with_attribute({number}),
    "a method": lambda number: with_attribute(types.MethodType(lambda self, x: x * number, 1)),
    "a class": made,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_form_of_a_block_has_attributes_by_value(make):
    known = {}
    assert form_of(make(1), known) == form_of(make(1), known)
    assert form_of(make(1), known) != form_of(make(2), known)
