"""Plain models of other kinds than language models, with their data and losses, as a user's folder holds them.

All in float64, with weights that are functions of their place, so that a loop of a few lines begins where a run does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

DIM, NUM = 8, 48


def settled(model):
    model = model.double()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_((0.4 * torch.sin(values * (place + 1.7) + place)).view(parameter.shape))
    return model


def drawn(index, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


class Items(torch.utils.data.Dataset):
    """Items by a function of their number."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        return self.make(index)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


# ---- images and classes ----------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, DIM, 3, padding=1)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 5)

    def forward(self, image):
        x = torch.tanh(self.conv(image)).mean((2, 3))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def classifier():
    return settled(Classifier())


def images():
    return Items(lambda index: (drawn(index, 3, 6, 6), index % 5))


def accuracy_of_two(output, target):
    return (output.topk(2).indices == target[:, None]).any(-1).sum(), target.numel()


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, DIM, 3, padding=1), nn.Conv2d(DIM, 4, 1)

    def forward(self, image):
        return self.last(torch.tanh(self.first(image)))


def segmenter():
    return settled(Segmenter())


def masks():
    def item(index):
        classes = torch.arange(36).view(6, 6) * (index + 1) % 4
        classes[: index % 5] = 255
        return drawn(index, 3, 6, 6), classes

    return Items(item)


# ---- autoencoder -----------------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(12, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.Linear(DIM, 12)

    def forward(self, x):
        x = self.down(x)
        for layer in self.layers:
            x = layer(x)
        return self.up(x)


def autoencoder():
    return settled(Autoencoder())


def vectors():
    return Items(lambda index: (drawn(index, 12), drawn(index, 12)))


# ---- diffusion: noise and timesteps travel in the batch --------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, DIM)
        self.steps = nn.Embedding(10, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.outer = nn.Linear(DIM, 12)

    def forward(self, clean, noise, timestep):
        share = ((timestep + 1).to(clean.dtype) / 10).unsqueeze(-1)
        x = self.inner((1 - share) * clean + share * noise) + self.steps(timestep)
        for layer in self.layers:
            x = layer(x)
        return self.outer(x)


def denoiser():
    return settled(Denoiser())


def noisy():
    def item(index):
        noise = drawn(index + 1000, 12)
        return {"clean": drawn(index, 12), "noise": noise, "timestep": index % 10, "targets": noise}

    return Items(item)


# ---- sequence to sequence: two inputs --------------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(16, DIM), nn.Embedding(16, DIM)
        self.encoder, self.decoder = Block(), Block()
        self.head = nn.Linear(DIM, 16)

    def forward(self, source, target):
        memory = self.encoder(self.source(source)).mean(1, keepdim=True)
        return self.head(self.decoder(self.target(target) + memory))


def translator():
    return settled(Translator())


def sentences():
    def item(index):
        target = torch.arange(7) * (index + 3) % 16
        target[5 - index % 4 :] = 0
        return torch.arange(5) * (index + 1) % 16, target[:-1], target[1:]

    return Items(item)


# ---- regression on named features, with two targets ------------------------------------------------------------------


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.block, self.head = nn.Linear(3 + 4, DIM), Block(), nn.Linear(DIM, 2)

    def forward(self, *, features, more):
        found = self.head(self.block(self.inner(torch.cat([features, more["values"]], -1))))
        return {"price": found[:, 0], "age": found[:, 1]}


def regressor():
    return settled(Regressor())


def houses():
    def item(index):
        inputs = {"features": drawn(index, 3), "more": {"values": drawn(index + 99, 4)}}
        return {**inputs, "targets": {"price": drawn(index + 7), "age": drawn(index)}}

    return Items(item)


def two_losses(output, target, *, weight):
    price = F.mse_loss(output["price"], target["price"].to(output["price"].dtype), reduction="sum")
    age = F.l1_loss(output["age"], target["age"].to(output["age"].dtype), reduction="sum")
    return price + weight * age, output["age"].numel()


# ---- a model that computes its own loss ------------------------------------------------------------------------------


class Karpathy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.block, self.head = nn.Embedding(16, DIM), Block(), nn.Linear(DIM, 16)

    def forward(self, idx, targets=None):
        logits = self.head(self.block(self.tok(idx)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def karpathy():
    return settled(Karpathy())


def rows():
    return Items(lambda index: torch.arange(8) * (index + 1) % 16)


# ---- pairs whose loss is no sum over samples -------------------------------------------------------------------------


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(6, DIM), nn.Linear(5, DIM), nn.Parameter(torch.ones(()))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1) * self.scale


def pairs():
    return settled(Pairs())


def captions():
    return Items(lambda index: {"image": drawn(index, 6), "text": drawn(index + 500, 5)})


def contrastive(output, target):
    logits = output[0] @ output[1].T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
