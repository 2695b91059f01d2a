"""Random numbers for tensors that every rank of cp has whole, or draws of all positions: those of one device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.selected_cases import selected
from support.sequence_draws import LENGTH, VOCAB, assert_same_draws, beside_one_device, cp
from torch import nn

DIM, HEADS = 8, 2


class Block(nn.Module):
    """Attention whose heads may be scaled, and an MLP."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.mlp = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def scaled(self, q_BHSE):
        return q_BHSE

    def forward(self, x_BSD):
        B, S, _ = x_BSD.shape
        q, k, v = self.qkv(x_BSD).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y_BHSE = F.scaled_dot_product_attention(self.scaled(q), k, v, is_causal=True)
        x_BSD = x_BSD + self.o(y_BHSE.transpose(1, 2).reshape(B, S, DIM))
        return x_BSD + self.mlp(x_BSD).relu()


class Language(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(VOCAB, DIM), nn.Embedding(16, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(self.block() for _ in range(2))

    def embedded(self, tokens_BS):
        return self.embed(tokens_BS) + self.place(torch.arange(tokens_BS.shape[1]))

    def through(self, x_BSD):
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD

    def forward(self, tokens_BS):
        return self.head(self.through(self.embedded(tokens_BS)))


class Latent(Language):
    """A latent of each sample, reparametrised."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread = (nn.Parameter(torch.zeros(DIM)) for _ in range(2))

    def embedded(self, tokens_BS):
        noise_BD = torch.empty(len(tokens_BS), DIM).normal_()
        return super().embedded(tokens_BS) + (self.mean + self.spread.exp() * noise_BD).unsqueeze(1)


class Scaled(Block):
    def scaled(self, q_BHSE):
        return q_BHSE * (1 + 0.3 * torch.randn(HEADS, 1, 1))


class ScaledHeads(Language):
    """A factor of each head, for all samples."""

    block = Scaled


class Words(Language):
    """Drops whole words of the vocabulary."""

    def embedded(self, tokens_BS):
        kept_V1 = torch.empty(VOCAB, 1).bernoulli_(0.7)
        return F.embedding(tokens_BS, self.embed.weight * kept_V1) + super().embedded(tokens_BS)


class Masked(Language):
    """Replaces tokens by masks of the whole sequence."""

    def embedded(self, tokens_BS):
        replaced_BS = torch.bernoulli(torch.full(tokens_BS.shape, 0.4)).bool()
        return super().embedded(torch.where(replaced_BS, torch.randint(VOCAB, tokens_BS.shape), tokens_BS))


class Mixed(Language):
    """Mixes samples in an order and proportions that are drawn."""

    def embedded(self, tokens_BS):
        x_BSD = super().embedded(tokens_BS)
        mixed = torch.distributions.Beta(0.5, 0.5).sample((len(x_BSD), 1, 1))
        return mixed * x_BSD + (1 - mixed) * x_BSD[torch.randperm(len(x_BSD))]


class Routed(Language):
    """Hard decisions of each position by noise."""

    def embedded(self, tokens_BS):
        x_BSD = super().embedded(tokens_BS)
        return F.rrelu(x_BSD * F.gumbel_softmax(x_BSD, hard=True), training=True)


class Counted(Language):
    """As many numbers as values ask for."""

    def embedded(self, tokens_BS):
        x_BSD = super().embedded(tokens_BS)
        return x_BSD + 0.1 * torch.poisson(x_BSD.abs().detach())


class Seeded(Language):
    """Seeds torch's generators in its forward, and has one of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def embedded(self, tokens_BS):
        x_BSD = super().embedded(tokens_BS)
        x_BSD = x_BSD * torch.empty_like(x_BSD).bernoulli_(0.8, generator=self.generator)
        torch.manual_seed(7)
        return F.dropout(x_BSD, 0.3)


class Recurring(Language):
    """A recurrent network whose layers draw between them, of all positions, and dropout of what is pooled of them."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(DIM, DIM, num_layers=2, dropout=0.3, batch_first=True)

    def embedded(self, tokens_BS):
        x_BSD = self.recurrent(super().embedded(tokens_BS))[0]
        return x_BSD + F.dropout(x_BSD.mean(1, keepdim=True), 0.3)


class LeftOut(Language):
    """Leaves out blocks by numbers of torch, Python and numpy."""

    def through(self, x_BSD):
        for layer in self.layers:
            if torch.rand(()).item() > 0.3 and random.random() > 0.3 and np.random.uniform() > 0.3:
                x_BSD = layer(x_BSD)
        return x_BSD


CASES = {
    "latents": (Latent, cp(more=""), LENGTH),
    "heads": (ScaledHeads, cp(), LENGTH),
    "words": (Words, cp(more=""), LENGTH),
    "masks": (Masked, cp(more=""), LENGTH),
    "masks, padded": (Masked, cp(more=""), LENGTH - 1),
    "samples": (Mixed, cp(), LENGTH),
    "noise": (Routed, cp(more=""), LENGTH),
    "counts": (Counted, cp(), LENGTH),
    "seeds": (Seeded, cp(more=""), LENGTH),
    "recurrent layers": (Recurring, cp(), LENGTH),
    "blocks": (LeftOut, cp(more=""), LENGTH),
}
# Draws without samples: one device has others in other micro-batches, and says so.
BY_BATCH = {
    "heads": ["randn in layers.0", "randn in layers.1"],
    "words": ["bernoulli_ in the model"],
    "samples": ["randperm in the model"],
}


@pytest.fixture(scope="module")
def results(request):
    names = selected(request, "name")
    return beside_one_device({name: CASES[name] for name in CASES if name in names})


@pytest.mark.parametrize("name", CASES)
def test_what_every_rank_has_whole_is_drawn_as_by_one_device(results, name):
    assert_same_draws(*results[name], sites=BY_BATCH.get(name, []))
