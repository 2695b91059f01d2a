"""Weights that attention drops inside, of a sharded sequence: those that one device drops, by every method."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.family_models import class_loss
from support.models import write_manifest
from support.selected_cases import selected
from support.sequence_draws import LENGTH, VOCAB, assert_same_draws, beside_one_device, cp
from torch import nn

from composer3d import Batch
from composer3d.testing import assert_parity

DIM, HEADS = 16, 4
TP = "[sharding.tensor_parallel]\n"
SP = f"{TP}sequence_parallel = true\n"
STAGES = '[scheduling.pipeline]\nschedule = "1F1B"\n[train]\nmicrobatch = 2\n'
BUDGET = '[train]\nmicrobatch = 1\n[scheduling.activation_checkpoint]\nmode = "budget"\nbudget_fraction = 1.0\n'


class Attention(nn.Module):
    """Attention of torch's function, with heads of keys that several of queries share."""

    def __init__(self, num_kv_heads, masked):
        super().__init__()
        self.num_kv_heads, self.masked = num_kv_heads, masked
        self.q, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = (nn.Linear(DIM, DIM // HEADS * num_kv_heads) for _ in range(2))

    def forward(self, x_BSD):
        B, S, _ = x_BSD.shape
        q, k, v = (layer(x_BSD).view(B, S, -1, DIM // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = torch.ones(S, S, dtype=torch.bool).tril() if self.masked else None
        shared = self.num_kv_heads != HEADS
        y_BHSE = F.scaled_dot_product_attention(q, k, v, mask, 0.3, is_causal=not self.masked, enable_gqa=shared)
        return x_BSD + self.o(y_BHSE.transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """torch's module, whose weights are needed or not."""

    def __init__(self, need_weights):
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.3, batch_first=True)

    def forward(self, x_BSD):
        S = x_BSD.shape[1]
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)
        return x_BSD + self.attention(x_BSD, x_BSD, x_BSD, attn_mask=mask, need_weights=self.need_weights)[0]


class Language(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


def fused(num_kv_heads=HEADS, masked=False):
    return Language(partial(Attention, num_kv_heads, masked))


def with_heads(need_weights):
    return Language(partial(Heads, need_weights))


def gpt2(implementation):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": DIM, "n_layer": 2, "n_head": HEADS}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, attn_implementation=implementation))


def method(name, *, balanced=True):
    return f'method = "{name}"\n' + ("" if balanced else "balanced = false\n")


CASES = {
    "gather": (fused, cp(more=method("gather")), LENGTH),
    "ring, runs": (fused, cp(more=method("ring", balanced=False)), LENGTH),
    "universal, recomputed": (fused, cp(BUDGET, more=method("universal")), LENGTH),
    "ulysses, shared keys, padded": (partial(fused, 2), cp(more=method("ulysses")), LENGTH - 3),
    "ring, a mask, padded": (partial(fused, masked=True), cp(more=method("ring")), LENGTH - 1),
    "heads": (partial(with_heads, False), cp(more=""), LENGTH),
    "heads and weights, padded": (partial(with_heads, True), cp(more=""), LENGTH - 1),
    "gpt2": (partial(gpt2, "sdpa"), cp(more=""), LENGTH),
    "gpt2, padded": (partial(gpt2, "sdpa"), cp(more=""), LENGTH - 3),
    "gpt2 written out": (partial(gpt2, "eager"), cp(more=""), LENGTH),
    "gpt2 written out, padded": (partial(gpt2, "eager"), cp(more=""), LENGTH - 1),
}
FOUR = {
    "heads over tp": (fused, cp(TP, more=method("ring"), mesh="tp = 2\n"), LENGTH),
    "heads over tp and cp": (fused, cp(TP, more=method("ulysses"), mesh="tp = 2\n"), LENGTH),
    "sequence parallelism, padded": (fused, cp(SP, more=method("gather"), mesh="tp = 2\n"), LENGTH - 2),
    "torch's heads over tp": (partial(with_heads, False), cp(TP, more="", mesh="tp = 2\n"), LENGTH),
    "torch's weights over tp": (partial(with_heads, True), cp(TP, more="", mesh="tp = 2\n"), LENGTH),
    "gpt2 over tp": (partial(gpt2, "sdpa"), cp(TP, more="", mesh="tp = 2\n"), LENGTH),
    "stages": (fused, cp(STAGES, more=method("ring"), mesh="pp = 2\n"), LENGTH),
    "usp": (fused, f"[mesh]\ncp = 4\n[sharding.context_parallel]\n{method('usp')}", LENGTH),
    "usp's ranks, by heads": (fused, f"[mesh]\ncp = 4\n[sharding.context_parallel]\n{method('ulysses')}", LENGTH - 1),
}


@pytest.fixture(scope="module")
def two(request):
    return beside_one_device({name: CASES[name] for name in CASES if name in selected(request, "name")})


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_drop_what_one_device_drops(two, name):
    assert_same_draws(*two[name])


@pytest.fixture(scope="module")
def four(request):
    return beside_one_device({name: FOUR[name] for name in FOUR if name in selected(request, "name")}, world_size=4)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_drop_what_one_device_drops(four, name):
    assert_same_draws(*four[name])


def test_heads_over_tp_alone_drop_what_one_device_drops():
    text = f"[mesh]\ntp = 2\n{TP}"
    cases = {"": (fused, text, LENGTH), "heads": (partial(with_heads, False), text, LENGTH)}
    for found in beside_one_device(cases).values():
        assert_same_draws(*found)


class Whole(Language):
    """Attention that drops weights, and a latent of each sample beside it."""

    def forward(self, tokens_BS):
        noise_B1D = torch.randn(len(tokens_BS), 1, DIM)
        x_BSD = self.embed(tokens_BS) + noise_B1D
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)


def test_a_layout_that_drops_weights_is_proven():
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCAB, (4, LENGTH), generator=generator) for _ in range(2))
    factory = partial(Whole, partial(Attention, HEADS, False))
    path, options = write_manifest(cp(more=method("ring"))), {"loss_fn": class_loss, "own_dtype": False}
    verdict = assert_parity(factory, path, Batch(args=(tokens,), target=targets), **options).verdict
    assert (verdict.failures, verdict.diagnosis, verdict.notes) == ((), (), ())
