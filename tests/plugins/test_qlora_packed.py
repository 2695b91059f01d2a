"""Adapters on fused projections that tp cuts per part, of torch's linear layers and of GPT-2's transposed ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import VOCAB, composed, full, mine, padded, seeded, sum_loss
from support.shared_worlds import in_one_world
from torch import nn

from composer3d import torch_compat
from composer3d.huggingface.folder import import_transformers
from composer3d.testing import run_ranks

# Before ranks are forked: each of them would import them anew.
nf4 = torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
import_transformers()

DIM, RANK = 128, 4
TABLES = {
    "nf4": f"[precision.qlora]\nrank = {RANK}\nscale_block = 1\n",
    "none": f'[precision.qlora]\nrank = {RANK}\nquantize = "none"\n',
}
PLAN = f"""\
[sharding.tensor_parallel.plan]
"layers.*.fused" = {{ style = "packed_colwise", parts = [{DIM}, {DIM}, {DIM}] }}
"layers.*.out" = "rowwise"
"""
FSDP = "[sharding.fsdp2]\n"
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + PLAN
TP_FSDP = "[mesh]\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n" + PLAN


def linear(kind, in_features, out_features):
    if kind == "linear":
        return nn.Linear(in_features, out_features)
    from transformers.pytorch_utils import Conv1D

    return Conv1D(out_features, in_features)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.fused, self.out = linear(kind, DIM, 3 * DIM), linear(kind, DIM, DIM)

    def forward(self, x):
        a, b, c = self.fused(x).chunk(3, -1)
        return x + self.out(torch.tanh(a) * b + c)


class Fused(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + 0.0


class ByHand(nn.Module):
    """What a layer with an adapter computes, written with torchao's own tensor."""

    def __init__(self, layer, a, quantise):
        super().__init__()
        weight = layer.weight.detach()
        if quantise:
            weight = nf4.to_nf4(weight.float(), 64, 1).get_original_weight().to(weight.dtype)
        self.frozen = weight if isinstance(layer, nn.Linear) else weight.t()
        self.bias, self.lora_a = layer.bias.detach(), nn.Parameter(a.clone())
        self.lora_b = nn.Parameter(torch.zeros(len(self.frozen), RANK).to(a.dtype))

    def forward(self, x):
        return F.linear(x, self.frozen, self.bias) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


def reference(kind, quantise, starts, chunks, num_steps):
    model = seeded(Fused, kind=kind).double().requires_grad_(False)
    for fqn, a in starts.items():
        parent, _, name = fqn.rpartition(".")
        setattr(model.get_submodule(parent), name, ByHand(model.get_submodule(fqn), a, quantise))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    tokens, targets = padded()
    for _ in range(num_steps):
        optimizer.zero_grad()
        for part, wanted in zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, _ = sum_loss(model(part), wanted)
            (loss / (targets != -100).sum()).backward()
        optimizer.step()
    return {name: (p.detach(), p.grad) for name, p in model.named_parameters() if p.requires_grad}


def trained(text, kind, quantise, num_steps=3, path=None, load=False):
    """Train adapters in a layout; return them beside those of one device, by the largest errors."""
    run = composed(text + TABLES[quantise], seeded(Fused, kind=kind).double())
    optimizer = run.optimizer(torch.optim.SGD, lr=2.0)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    if load:
        run.load(path)
    adapters = {name: p for name, p in run.named_parameters() if p.requires_grad}

    def whole(name, tensor):
        return run.context.in_model_order(name, full(tensor)).clone()

    starts = {n.removesuffix(".lora_a"): whole(n, p) for n, p in adapters.items() if n.endswith("lora_a")}
    for number in range(num_steps):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            if number == num_steps - 1:
                gradients = {name: whole(name, p.grad) for name, p in adapters.items()}
            optimizer.step()
            optimizer.zero_grad()
    found = {name: whole(name, p) for name, p in adapters.items()}
    if path is not None and not load:
        run.save(path)
    run.close()
    if not num_steps:
        return found
    wanted = reference(kind, quantise == "nf4", starts, run.context.data_parallel_degree, num_steps)
    assert found.keys() == wanted.keys() and len(found) == 2 * 4
    return max(
        float((mine - reference).abs().max() / reference.abs().max())
        for name in found
        for mine, reference in zip((found[name], gradients[name]), wanted[name], strict=True)
    )


@pytest.mark.parametrize("kind", ["linear", "transposed"])
@pytest.mark.parametrize(
    ("world_size", "layouts"), [(1, [""]), pytest.param(2, [FSDP, TP], marks=pytest.mark.slow), (4, [TP_FSDP])]
)
def test_adapters_are_those_of_one_device(world_size, layouts, kind):
    cases = ((layout, kind, quantise) for layout in layouts for quantise in TABLES)
    for ranks in in_one_world(trained, world_size, *cases):
        assert max(ranks) < 1e-12


@pytest.mark.parametrize("kind", [pytest.param("linear", marks=pytest.mark.slow), "transposed"])
def test_what_is_kept_in_another_order_is_saved_in_the_models(tmp_path, kind):
    path = tmp_path / "step-3"
    _, (two, _) = in_one_world(trained, 2, (TP, kind, "nf4", 3, path), (TP, kind, "nf4", 0, path, True))
    ((one, wanted),) = run_ranks(lambda: (trained("", kind, "nf4", 0, path, True), by_hand(kind)), 1)
    assert any(value.abs().max() > 0 for name, value in one.items() if name.endswith("lora_b"))
    assert all(torch.equal(one[name], value) for name, value in two.items())
    # In the model's own order the first rank's share is not the first half of the fused outputs.
    assert all(torch.allclose(one[name], value, rtol=0, atol=1e-12) for name, value in wanted.items())


def by_hand(kind):
    run = composed(TABLES["nf4"], seeded(Fused, kind=kind).double())
    starts = {n.removesuffix(".lora_a"): full(p).clone() for n, p in run.named_parameters() if n.endswith("lora_a")}
    run.close()
    return {name: value for name, (value, _) in reference(kind, True, starts, 1, 3).items()}
