"""Sequences sharded over cp: any model equals one device, with the collectives of its method."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from support.tensor_parallel import steps_of
from torch import nn

import composer3d
from composer3d import ComposerError
from composer3d.testing import run_ranks


def cp(method="gather", *, degree=2, mesh="", more=""):
    return f'[mesh]\ncp = {degree}\n{mesh}\n[sharding.context_parallel]\nmethod = "{method}"\n{more}'


def assert_equal_to_one_device(world_size, cases):
    """Compare loss, norm and gradients of every case with one device; return the collectives over cp."""
    counted = []
    for results in run_ranks(steps_of, world_size, cases):
        for case, (loss, norm, gradient, _) in zip(cases, results, strict=True):
            assert max(loss, norm, gradient) <= 1e-12, (case, loss, norm, gradient)
        counted = [{op: n for (op, axis), n in found[3].items() if axis == "cp"} for found in results]
    return counted


def test_methods_equal_one_device_with_their_collectives():
    cases = [("llama", cp(method)) for method in ("gather", "gather_once", "ring", "ulysses", "universal")]
    gather, once, ring, ulysses, universal = assert_equal_to_one_device(2, cases)
    layers = 2
    assert (gather["all_gather"], gather["reduce_scatter"]) == (2 * layers, layers)
    assert (once["all_gather"], once["reduce_scatter"]) == (layers, layers)
    assert ring["send"] == ring["recv"] == (3 * 2 - 2) * layers
    assert ulysses["all_to_all"] == 8 * layers
    assert (universal["all_gather"], universal["reduce_scatter"]) == (2 * layers, 2 * layers)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_usp_exchanges_heads_inside_of_a_ring(family):
    assert_equal_to_one_device(4, [(family, cp("usp", degree=4))])


def test_models_that_know_nothing_of_it():
    # Learned positions, attention written out with a mask of padding and head, fused projections.
    assert_equal_to_one_device(2, [("gpt2", cp()), ("bert", cp()), ("bert", cp(more="balanced = false"))])


def test_tensor_parallel_inside():
    tp = "[sharding.tensor_parallel]\n"
    cases = [("llama", cp(mesh="tp = 2", more=tp)), ("llama", cp(mesh="tp = 2", more=f"{tp}sequence_parallel = true"))]
    assert_equal_to_one_device(4, cases)


class Averaging(nn.Module):
    """A sum over positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(1))


class Alone(Averaging):
    """Every token by itself."""

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Pooled(Averaging):
    """Attention, and the mean of all positions."""

    def forward(self, tokens):
        x_BSD = self.embedding(tokens)
        x_BSD = F.scaled_dot_product_attention(x_BSD, x_BSD, x_BSD)
        return self.head(x_BSD.mean(1))


def flash_attn_func(q, k, v):
    """Stand for a binding of CUDA code, which is never called."""


flash_attn_func.__module__ = "flash_attn.flash_attn_interface"


class Opaque(Averaging):
    """A kernel past torch's operators."""

    def forward(self, tokens):
        x_BSD = self.embedding(tokens)
        return self.head(flash_attn_func(x_BSD, x_BSD, x_BSD))


def composed(factory, text):
    run = composer3d.compose(factory, write_manifest(text), loss_fn=lambda out, target: out.sum())
    try:
        run.forward_backward(torch.zeros(2, 8, dtype=torch.int64))
    finally:
        run.close()


class Raising(Pooled):
    """Code of a model's own that refuses what has no values."""

    def forward(self, tokens):
        if tokens.is_meta:
            raise KeyError("no values")
        return super().forward(tokens)


REFUSED = [
    (Alone, cp(), "context_parallel has no effect: no attention, convolution or scan of the model works on the seq"),
    (Averaging, cp(more='others = "refuse"'), 'cumsum mixes positions, and others = "refuse" gathers nothing'),
    (
        Opaque,
        cp(),
        "calls flash_attn.flash_attn_interface.flash_attn_func, a kernel that is no operator of torch: which positions "
        "it reads cannot be seen",
    ),
    (
        Raising,
        cp(),
        "the model could not be run on meta to see how tensors go through it (KeyError: 'no values', at "
        "test_context_parallel.py:",
    ),
    (Pooled, cp(more="inner_degree = 2"), 'inner_degree has no effect with method = "gather"'),
    (Pooled, cp("usp"), "needs a divisor of cp = 2, other than 1 and 2, that divides the 1 heads"),
    (Pooled, cp(more='others = "refuse"'), 'mean mixes positions, and others = "refuse" gathers nothing'),
]


def refusals():
    found = []
    for factory, text, _ in REFUSED:
        with pytest.raises(ComposerError) as caught:
            composed(factory, text)
        found.append(str(caught.value))
    return found


def test_refusals():
    for found in run_ranks(refusals, 2):
        for text, (_, _, wanted) in zip(found, REFUSED, strict=True):
            assert wanted in text


class Mixing(Averaging):
    """Projections along the sequence, as in MLP-Mixer, of which tensor parallelism shards the hidden layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens):
        x_BSD = self.embedding(tokens)
        return self.head(x_BSD + self.down(F.gelu(self.up(x_BSD.mT))).mT)


def test_a_sum_over_positions_whose_weight_tp_shards_is_refused():
    text = "[mesh]\ncp = 2\ntp = 2\n[sharding.context_parallel]\n[sharding.tensor_parallel]\n"

    def refused():
        example = ((torch.zeros(2, 8, dtype=torch.int64),), {})
        with pytest.raises(ComposerError) as caught:
            composer3d.compose(Mixing, write_manifest(text), example=example)
        return str(caught.value)

    for said in run_ranks(refused, 4):
        assert '"up" sums over positions, which are sharded over cp, and tp shards its weight; leave it out' in said
