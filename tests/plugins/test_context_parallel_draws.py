"""Random numbers of a sharded sequence: each rank draws those that one device draws for its positions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.family_models import class_loss
from support.models import mine, seeded, write_manifest
from support.selected_cases import selected
from torch import nn

import composer3d
from composer3d.models import llama, moe
from composer3d.testing import full, run_ranks

VOCAB, LENGTH = 11, 8
TIGHT = 1e-12
SIZES = {"vocab_size": VOCAB, "dim": 16, "num_layers": 2, "num_heads": 4, "ffn_dim": 24, "dropout": 0.3}
LLAMA = partial(llama, **SIZES)
MOE = partial(moe, **SIZES, num_experts=4, expert_dim=8)
FSDP_EP = "[sharding.fsdp2]\n[sharding.expert_parallel]\n"
ADAPTERS = '[precision.qlora]\nrank = 2\nquantize = "none"\ndropout = 0.3\n'
BUDGET = '[scheduling.activation_checkpoint]\nmode = "budget"\nbudget_fraction = 1.0\n'


class Noisy(nn.Module):
    """A causal layer with noise, dropped vectors and rows, and weights of attention written out and dropped."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        x_BSD = x_BSD + 0.5 * torch.randn_like(x_BSD)
        x_BSD = x_BSD * torch.empty_like(x_BSD[..., :1]).bernoulli_(0.8)
        scores_BST = self.q(x_BSD) @ x_BSD.transpose(1, 2)
        causal_ST = torch.ones(scores_BST.shape[1:], dtype=torch.bool).tril()
        weights_BST = F.dropout(scores_BST.masked_fill(~causal_ST, -1e9).softmax(-1), 0.3)
        y_BSD = x_BSD + weights_BST @ x_BSD
        return self.out(F.alpha_dropout(y_BSD.flatten(0, 1), 0.2, training=True)).view(*tokens_BS.shape, -1)


def cp(text="", *, more="balanced = false\n", mesh=""):
    return f"[mesh]\ncp = 2\n{mesh}[sharding.context_parallel]\n{more}{text}"


CASES = {
    "runs": (LLAMA, cp(), LENGTH),
    "balanced": (LLAMA, cp(more=""), LENGTH),
    "padded": (LLAMA, cp(), LENGTH - 1),
    "balanced and padded": (LLAMA, cp(more=""), LENGTH - 3),
    "micro-batches, recomputed": (LLAMA, cp("[train]\nmicrobatch = 1\n" + BUDGET), LENGTH),
    "experts, recomputed": (MOE, cp(FSDP_EP + BUDGET, mesh="ep = 2\n"), LENGTH),
    "other draws": (Noisy, cp(more=""), LENGTH),
    "adapters": (LLAMA, cp(ADAPTERS), LENGTH),
}


def gradients(factory, text, length):
    """Return gradients of two steps in float64, and the sites that do not draw by sample."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2))
    run = composer3d.compose(seeded(factory), write_manifest(text), loss_fn=loss, example=((tokens,), {}))
    found = []
    for number in range(2):
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(float("inf"))
            trained = [(name, p.grad) for name, p in run.named_parameters() if p.grad is not None]
            found.append({name: full(grad).clone() for name, grad in trained})
            for parameter in run.model.parameters():
                parameter.grad = None
    sites = [str(site) for site in run.context.streams.sites.values() if not site.by_sample]
    run.close()
    return found, sites


def loss(output, target):
    return class_loss(getattr(output, "logits", output), target)


def several(cases):
    return [gradients(*case) for case in cases]


@pytest.fixture(scope="module")
def results(request):
    cases = {name: CASES[name] for name in CASES if name in selected(request, "name")}
    alone = {
        name: (factory, ADAPTERS if ADAPTERS in text else "", length) for name, (factory, text, length) in cases.items()
    }
    (found,) = run_ranks(several, 1, list(alone.values()))
    alone = dict(zip(alone, found, strict=True))
    ranks = run_ranks(several, 2, list(cases.values()))
    return {name: (alone[name], [rank[at] for rank in ranks]) for at, name in enumerate(cases)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device_with_its_random_numbers(results, name):
    alone, ranks = results[name]
    assert_same_draws(alone, ranks)


def test_a_sequence_that_tp_shards_too_has_the_random_numbers_of_one_device():
    text = cp("[sharding.tensor_parallel]\nsequence_parallel = true\n", more="", mesh="tp = 2\n")
    (alone,) = run_ranks(gradients, 1, LLAMA, "", LENGTH)
    assert_same_draws(alone, run_ranks(gradients, 4, LLAMA, text, LENGTH))


def assert_same_draws(alone, ranks):
    expected, _ = alone
    for found, sites in ranks:
        assert sites == []
        for step, one in zip(found, expected, strict=True):
            for fqn, gradient in one.items():
                assert float((step[fqn] - gradient).abs().max()) <= TIGHT * max(1e-3, float(gradient.abs().max())), fqn
    # Steps draw other numbers.
    assert any(not torch.equal(expected[0][fqn], expected[1][fqn]) for fqn in expected[0])


class Fused(nn.Module):
    """Attention that drops weights inside."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens_BS):
        x_B1SD = self.embed(tokens_BS).unsqueeze(1)
        return self.out(F.scaled_dot_product_attention(x_B1SD, x_B1SD, x_B1SD, None, 0.3, True).squeeze(1))


def test_what_attention_drops_inside_is_known_to_be_other_numbers():
    for _, sites in run_ranks(gradients, 2, Fused, cp(), LENGTH):
        assert len(sites) == 1 and sites[0].startswith("scaled_dot_product_attention in ")
