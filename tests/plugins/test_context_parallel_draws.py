"""Random numbers of a sharded sequence: each rank draws those that one device draws for its positions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.selected_cases import selected
from support.sequence_draws import LENGTH, VOCAB, assert_same_draws, beside_one_device, cp
from torch import nn

from composer3d.models import llama, moe

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


@pytest.fixture(scope="module")
def results(request):
    cases = {name: CASES[name] for name in CASES if name in selected(request, "name")}
    adapted = {name: case for name, case in cases.items() if ADAPTERS in case[1]}
    found = beside_one_device({name: case for name, case in cases.items() if name not in adapted})
    return found | (beside_one_device(adapted, alone=ADAPTERS) if adapted else {})


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device_with_its_random_numbers(results, name):
    alone, ranks = results[name]
    assert_same_draws(alone, ranks)


def test_a_sequence_that_tp_shards_too_has_the_random_numbers_of_one_device():
    text = cp("[sharding.tensor_parallel]\nsequence_parallel = true\n", more="", mesh="tp = 2\n")
    found = beside_one_device({"": (LLAMA, text, LENGTH)}, world_size=4)
    assert_same_draws(*found[""])
