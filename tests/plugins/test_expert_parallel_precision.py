"""Narrow dtypes with experts sharded over ep: rounded no more than by data parallelism, stacked and in lists."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import Looped, token_sum
from support.models import largest, mine, seeded, write_manifest
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu

import composer3d
from composer3d import PluginError, summed_dims
from composer3d.composition.experts.expert_products import multiply_experts
from composer3d.models import moe
from composer3d.testing import full, run_ranks

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


CASES = [(name, table) for name in FACTORIES for table in TABLES]


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
        changed = [fqn for fqn in experts if fqn not in wide or error({fqn: one[fqn]}, wide) > 1e-3]
        assert len(changed) == len(experts) == (12 if table == "qlora" else 6)


def adapted(text):
    """Train adapters for a step in float64; return their gradients, what a weight's bytes are, and both results."""
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(1))
    run = composer3d.compose(seeded(stacked), write_manifest(text), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
    found = []
    for step in range(2):  # adapters begin at zero: those of the second step see both
        with run.step(step):
            run.forward_backward(mine(run, tokens[:, :-1].contiguous()), target=mine(run, tokens[:, 1:].contiguous()))
            found.append({fqn: full(p.grad).clone() for fqn, p in run.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
    kept = {fqn: full(p.detach()) for fqn, p in run.named_parameters() if "experts" in fqn}
    run.close()
    return found[1], kept


@pytest.mark.parametrize("quantize", ["nf4", pytest.param("none", marks=pytest.mark.slow)])
def test_adapters_of_stacked_weights_are_one_devices(quantize):
    text = f'[precision.qlora]\nrank = 4\nquantize = "{quantize}"\n'
    (one,) = run_ranks(adapted, 1, text)
    for gradients, kept in run_ranks(adapted, 2, EP + text):
        scale = largest(float(gradient.abs().max()) for gradient in one[0].values())
        assert largest(float((g - one[0][fqn]).abs().max()) for fqn, g in gradients.items()) <= 1e-12 * scale
        assert all(g.any() for g in gradients.values())
        for fqn, value in kept.items():
            if "lora" not in fqn:
                assert value.dtype == (torch.uint8 if quantize == "nf4" else torch.float64)
                assert torch.equal(value, one[1][fqn])
        if quantize == "nf4":  # 33 bytes and a factor of 8 for 64 elements
            assert kept["layers.0.feed_forward.experts.w1_NDF"].shape == (4, DIM, 33 + 8)


def test_a_stacked_weight_is_summed_over_the_dim_that_its_code_sums_over():
    experts = stacked().layers[0].feed_forward.experts
    assert summed_dims(experts, fqn="experts", by="test") == {"w1_NDF": 1, "w3_NDF": 1, "w2_NFD": 1}
    module = Stack(lambda x, w: torch.stack([linear(x[0], w[0].t())]))
    assert summed_dims(module, fqn="experts", by="test") == {"w_EIO": 1}


class Stack(nn.Module):
    """Weights that `compute` multiplies rows with."""

    def __init__(self, compute):
        super().__init__()
        self.num_experts, self.compute = 3, compute
        self.w_EIO = nn.Parameter(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, index, weights):
        return self.compute(x, self.w_EIO)


ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
OF_ROWS = torch.tensor([2, 0, 2, 0, 2])
WAYS = {
    "grouped_mm": lambda x, w: grouped_mm(x, w, offs=ENDS),
    "linear": lambda x, w: torch.cat([linear(x[:2], w[0].t()), linear(x[2:5], w[2].mT)]),
    "matmul": lambda x, w: torch.cat([x[:2] @ w[0], torch.mm(x[2:5], w.unbind()[2])]),
    "bmm": lambda x, w: torch.bmm(x[:3].reshape(3, 1, 8), w).squeeze(1),
    "chosen": lambda x, w: torch.bmm(x.unsqueeze(1), w[OF_ROWS]).squeeze(1),
    "chosen first": lambda x, w: torch.bmm(w.mT[OF_ROWS], x.unsqueeze(-1)).squeeze(-1),
    "chosen and turned": lambda x, w: (w[OF_ROWS].mT @ x.unsqueeze(-1)).squeeze(-1),
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
    assert [size for size in called if size] == ([1, 1, 1] if way == "bmm" else [2, 3])
    found.sum().backward()
    assert way == "bmm" or not module.w_EIO.grad[1].any()


BROADCAST = {
    "rows of several dims": lambda x, w: x.view(5, 1, 2, 4) @ w[:, :4],
    "several leading dims": lambda x, w: x.view(5, 1, 1, 2, 4) @ w[:, :4],
    "a matrix of leading dims": lambda x, w: x.view(5, 2, 1, 1, 4) @ w[None, :, :4],
    "one matrix of a stack": lambda x, w: x.view(5, 2, 1, 4) @ w[1:2, :4],
    "stacks for each row": lambda x, w: x.view(5, 1, 1, 8) @ w.expand(5, 3, 8, 4),
    "matrices first": lambda x, w: w.mT @ x.view(5, 1, 8, 1),
    "added": lambda x, w: torch.addmm(x[0, :4], x, w[1], beta=2, alpha=0.5),
    "added to no input": lambda x, w: torch.addmm(x.new_full((4,), torch.nan), x, w[1], beta=0),
    "added to each": lambda x, w: torch.baddbmm(x[:3, :1, None], w.mT, x[:3, :, None]),
    "chosen for each choice": lambda x, w: torch.einsum("rkdf,rd->rkf", w[PART], x),
    "chosen, turned and added up": lambda x, w: torch.einsum("rd,r...fd,rk->rf", x, w.mT[PART], x[:, :2]),
    "chosen and turned, of several rows": lambda x, w: torch.einsum("rkfd,crd->crkf", w[PART].mT, x.view(1, 5, 8)),
    "chosen, of one dim": lambda x, w: torch.einsum("rd,rdf->rf", x, w[OF_ROWS]),
    "chosen in several dims": lambda x, w: (x.view(5, 1, 1, 8) @ w[PART]).squeeze(2),
    "chosen in several dims, first": lambda x, w: w[PART].mT @ x.view(5, 1, 8, 1),
    "chosen and flattened": lambda x, w: torch.bmm(x.repeat_interleave(2, 0)[:, None], w[PART].flatten(0, 1)),
    "a vector": lambda x, w: x[0] @ w,
    "matrices and a vector": lambda x, w: torch.matmul(w.mT, x[0]),
}


@pytest.mark.parametrize("way", BROADCAST)
def test_products_that_broadcast_over_experts_are_those_of_torch(way):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = Stack(BROADCAST[way]).double()
    right = module(x, None, None)
    right.square().sum().backward()
    expected, module.w_EIO.grad = module.w_EIO.grad, None
    multiply_experts(module, linear, fqn="experts", by="test")
    found = module(x, None, None)
    assert found.shape == right.shape
    assert torch.allclose(found, right, rtol=0, atol=1e-14)
    found.square().sum().backward()
    assert float((module.w_EIO.grad - expected).abs().max()) < 1e-13


PART = torch.tensor([[0, 2], [1, 0], [2, 2], [0, 0], [1, 1]])
OTHERWISE = {
    "more rows": lambda x, w: x.view(5, 1, 1, 8) @ w[OF_ROWS],
    "some of the matrices": lambda x, w: torch.bmm(x[:2].unsqueeze(1), w[OF_ROWS][:2]),
    "moved": lambda x, w: torch.einsum("rd,krdf->rkf", x, w[PART].transpose(0, 1)),
    "merged": lambda x, w: torch.einsum("rk,rkdf->rdf", x[:, :2], w[PART]),
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_other_uses_of_matrices_chosen_for_rows_are_refused(way):
    module = Stack(OTHERWISE[way])
    multiply_experts(module, linear, fqn="experts", by="test")
    with pytest.raises(PluginError, match=r"use their weights in `.*`, which is no product of rows"):
        module(torch.randn(5, 8), None, None)


def test_weights_that_are_used_otherwise_are_refused():
    module = Stack(lambda x, w: silu(x @ w.sum(0)))
    multiply_experts(module, linear, fqn="layers.0.experts", by="float8")
    with pytest.raises(PluginError) as caught:
        module(torch.randn(5, 8), None, None)
    assert str(caught.value) == (
        'float8: the experts of "layers.0.experts" use their weights in `sum`, which is no product of rows with a '
        "matrix of each expert; it computes F.grouped_mm, F.linear, torch.matmul, torch.bmm, and torch.einsum that "
        "sums over one dim of rows and matrices; write these, and weigh or add up what experts return in place of "
        'their weights, or exclude "layers.0.experts"'
    )
