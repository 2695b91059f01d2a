"""Models that know nothing of a sharded sequence compute on its shards what one device computes on all of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.family_models import GPT2, VOCAB, Bert, small_llama
from support.foreign_models import T5, Encoder
from support.masked_mixtures import Language
from support.sequence_threads import run_sharded
from torch import nn

ATTENTION = ("attention", "scaled_dot_product_attention")
LENGTH, DIM = 16, 16


class Einsum(nn.Module):
    """Attention as two einsums, with a mask that its own code makes, and a bias by distance that is trained."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.slopes = nn.Parameter(torch.rand(2))

    def forward(self, tokens):
        x_BSHE = self.embedding(tokens).unflatten(-1, (2, -1))
        at = torch.arange(tokens.shape[1])
        bias = -(at[:, None] - at).abs() * self.slopes[:, None, None]
        scores = torch.einsum("bshe,bthe->bhst", x_BSHE, x_BSHE) + bias
        weights = scores.masked_fill(at > at[:, None], float("-inf")).softmax(-1)
        return self.head(torch.einsum("bhst,bthe->bshe", weights, x_BSHE).flatten(2))


class Convolving(nn.Module):
    """Positions mixed by a causal convolution and a sum, which no rule of attention covers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.conv = nn.Embedding(VOCAB, DIM), nn.Conv1d(DIM, DIM, 3, groups=DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x_BSD = self.embedding(tokens)
        x_BSD = x_BSD + self.conv(F.pad(x_BSD.transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.head(x_BSD.cumsum(1))


class Writing(nn.Module):
    """Writes into some positions, one after another, and into a view of them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x_BSD = self.embedding(tokens) * 1.0
        x_BSD[:, 0] = 0.5
        x_BSD[:, 4:9].mul_(2.0)
        written_BSD = torch.zeros_like(x_BSD)
        for at, x_BD in enumerate(x_BSD.unbind(1)):
            written_BSD[:, at] = x_BD * x_BSD[:, at - 1]
        return self.head(written_BSD)


MODELS = {
    "llama": (small_llama, {ATTENTION: 2}),
    "gpt2": (GPT2, {ATTENTION: 2}),
    # Its mask by key is made of its tokens.
    "bert": (Bert, {("products", "matmul"): 4, ("products", "add"): 2}),
    "t5": (T5, None),
    "heads": (Encoder, {ATTENTION: 2}),
    "einsum": (Einsum, {("products", "einsum"): 2}),
    "writing": (Writing, None),
    "rows by masks": (lambda: Language("add of tokens"), None),
    "convolving": (Convolving, {("neighbours", "conv1d"): 1, ("gathered", "cumsum"): 1, ("narrowed", "cumsum"): 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_both_ranks_add_up_to_those_of_one_device(name):
    factory, noted = MODELS[name]
    torch.manual_seed(0)
    model = factory().double().train()
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    targets = torch.randint(0, VOCAB, (2, LENGTH))
    targets[0, 3:9] = -100
    targets[1, 12:] = -100

    def loss(logits, index):
        # Logits that are whole are the same on both ranks, which count them both.
        own = targets if logits.shape[1] == LENGTH and len(index) < LENGTH else targets[:, index]
        share = 0.5 if own is targets and len(index) < LENGTH else 1.0
        return share * F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")

    expected = loss(model(tokens), torch.arange(LENGTH))
    expected.backward()
    wanted = {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    found, notes = run_sharded(model, tokens, loss)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for fqn, parameter in model.named_parameters():
        if fqn in wanted:
            assert float((parameter.grad - wanted[fqn]).abs().max()) <= 1e-13 * largest, fqn
    assert noted is None or dict(notes) == noted
