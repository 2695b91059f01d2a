"""Narrow dtypes with experts sharded over ep: rounded no more than by data parallelism, stacked and in lists."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import Looped, token_sum
from support.models import largest, mine, seeded, write_manifest
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu

import composer3d
from composer3d import ManifestError, PluginError
from composer3d.composition.expert_products import multiply_experts
from composer3d.models import moe
from composer3d.testing import fake_world, full, run_ranks

DIM = 64
VOCAB = 64
EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
DATA = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
# A sum in another order differs by about so much.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 1e-6}
TABLES = {
    "bf16": ("[precision.mixed]\n", "bfloat16"),
    "fp16": ('[precision.mixed]\nparam_dtype = "float16"\n', "float16"),
    "float8": ("[precision.float8]\n", "float32"),
    "float8 rows": ('[precision.float8]\nrecipe = "rowwise"\n', "float32"),
    "mxfp8": ("[precision.mxfp8]\n", "float32"),
    "int8": ("[precision.int8]\n", "float32"),
    "qlora": ("[precision.qlora]\nrank = 4\n", "float32"),
    "qat": ("[precision.qat]\n", "float32"),
}


class Wide(Looped):
    """Experts of a list, wide enough for every format."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(4)
        )


class Listed(nn.Module):
    """A list of experts in each of two layers."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Wide() for _ in range(2))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def stacked():
    sizes = {"dim": DIM, "num_layers": 2, "num_heads": 2, "num_experts": 4, "vocab_size": VOCAB, "expert_dim": DIM}
    return moe(**sizes, balance_loss=0.0)


FACTORIES = {"stacked": stacked, "listed": Listed}


def gradients(name, text):
    """Return the gradients of one step, in full, of this rank's parameters."""
    tokens = torch.randint(0, VOCAB, (4, 33), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].masked_fill(torch.arange(32) < 3, -100)
    run = composer3d.compose(seeded(FACTORIES[name]), write_manifest(text), loss_fn=token_sum)
    run.optimizer(torch.optim.SGD, lr=0.1)  # a scaler needs one
    with run.step(0):
        run.forward_backward(mine(run, tokens[:, :-1].contiguous()), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
        found = {fqn: full(p.grad).float().clone() for fqn, p in run.named_parameters() if p.grad is not None}
    run.close()
    return found


def error(found, reference):
    assert found
    return largest(float((g - reference[fqn]).norm() / reference[fqn].norm()) for fqn, g in found.items())


CASES = [(name, table) for name in FACTORIES for table in TABLES if name == "listed" or table not in ("qlora", "qat")]


@pytest.mark.parametrize(("name", "table"), CASES, ids=[f"{name}-{table}" for name, table in CASES])
def test_rounding_is_that_of_data_parallelism(name, table):
    text, dtype = TABLES[table]
    (one,) = run_ranks(gradients, 1, name, f"[sharding.fsdp2]\n{text}")
    samples = error(run_ranks(gradients, 2, name, DATA + text)[0], one)
    ranks = run_ranks(gradients, 2, name, EP + text)
    for rank in ranks:
        assert error(rank, one) <= 2 * max(samples, ROUNDING[dtype])
    assert {fqn for rank in ranks for fqn in rank} == one.keys()
    if name == "stacked" and dtype == "float32":
        (wide,) = run_ranks(gradients, 1, name, "[sharding.fsdp2]\n")
        experts = [fqn for fqn in one if "experts" in fqn]
        assert len(experts) == 6 and all(error({fqn: one[fqn]}, wide) > 1e-3 for fqn in experts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[precision.qlora]\nrank = 4\n", '"layers.0.feed_forward.experts" stacks the weights of experts in one'),
        (
            "[precision.qat]\n",
            '"layers.0.feed_forward.experts" stacks the weights of experts in one parameter, and qat',
        ),
    ],
)
def test_stacked_experts_that_would_stay_as_they_are_are_refused(text, message):
    with fake_world(1), pytest.raises(ManifestError) as caught:
        composer3d.compose(stacked, write_manifest(text), loss_fn=token_sum)
    assert message in str(caught.value)
    left = text + (
        'keep = ["layers.*.feed_forward.experts"]\n'
        if "qlora" in text
        else 'exclude = ["layers.*.feed_forward.experts"]\n'
    )
    with fake_world(1):
        composer3d.compose(stacked, write_manifest(left), loss_fn=token_sum).close()


class Stack(nn.Module):
    """Weights that `compute` multiplies rows with."""

    def __init__(self, compute):
        super().__init__()
        self.num_experts, self.compute = 3, compute
        self.w_EIO = nn.Parameter(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, index, weights):
        return self.compute(x, self.w_EIO)


ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
WAYS = {
    "grouped_mm": lambda x, w: grouped_mm(x, w, offs=ENDS),
    "linear": lambda x, w: torch.cat([linear(x[:2], w[0].t()), linear(x[2:5], w[2].mT)]),
    "matmul": lambda x, w: torch.cat([x[:2] @ w[0], torch.mm(x[2:5], w.unbind()[2])]),
    "bmm": lambda x, w: torch.bmm(x[:3].reshape(3, 1, 8), w).squeeze(1),
}


@pytest.mark.parametrize("way", WAYS)
def test_products_with_stacked_weights_are_taken_over(way):
    x, called = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), []

    def product(x_RI, w_OI):
        called.append(x_RI.shape[0])
        return 3.0 * linear(x_RI, w_OI)

    module, right = Stack(WAYS[way]), Stack(WAYS[way])(x, None, None)
    multiply_experts(module, product, fqn="experts", by="test")
    found = module(x, None, None)
    assert torch.allclose(found, 3.0 * right, atol=1e-6)
    assert called == ([1, 1, 1] if way == "bmm" else [2, 3])
    found.sum().backward()
    assert way == "bmm" or not module.w_EIO.grad[1].any()


def test_weights_that_are_used_otherwise_are_refused():
    module = Stack(lambda x, w: silu(torch.einsum("ri,eio->ro", x, w)))
    multiply_experts(module, linear, fqn="layers.0.experts", by="float8")
    with pytest.raises(PluginError) as caught:
        module(torch.randn(5, 8), None, None)
    assert str(caught.value) == (
        'float8: the experts of "layers.0.experts" use their weights in `einsum`, which it does not compute; write '
        'F.grouped_mm, F.linear, torch.matmul or torch.bmm with them, or exclude "layers.0.experts"'
    )
