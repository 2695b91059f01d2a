"""Models that draw in their forward as those of images do: dropped labels, stochastic depth, noise and its times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

DIM, CLASSES, STEPS = 8, 5, 20


class Block(nn.Module):
    """Of both branches, some samples leave the second out."""

    def __init__(self, drop_path, dropout):
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop_path, self.dropout = drop_path, nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(torch.tanh(self.mix(x)))
        kept = torch.bernoulli(torch.full((x.shape[0], 1, 1), 1 - self.drop_path, dtype=x.dtype))
        hidden = F.dropout(torch.tanh(self.up(x)), 0.25, self.training)
        return x + kept / (1 - self.drop_path) * self.down(hidden)


class Stochastic(nn.Module):
    """A small vision transformer with stochastic depth."""

    def __init__(self, num_layers=4, drop_path=0.3, dropout=0.2):
        super().__init__()
        self.patch = nn.Linear(6, DIM)
        self.layers = nn.ModuleList(Block(drop_path, dropout) for _ in range(num_layers))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, image):
        x = self.patch(image)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Shared(Stochastic):
    """Blocks of which all have the one module that drops."""

    def __init__(self, num_layers=4):
        super().__init__(num_layers, drop_path=0.0)
        for layer in self.layers:
            layer.dropout = self.layers[0].dropout


class Guided(Stochastic):
    """A denoiser with labels, some of which are dropped for guidance without a classifier."""

    def __init__(self, num_layers=4):
        super().__init__(num_layers, drop_path=0.0, dropout=0.0)
        self.label = nn.Embedding(CLASSES + 1, DIM)

    def forward(self, image, label):
        dropped = torch.rand(label.shape[0], device=label.device) < 0.3
        x = self.patch(image) + self.label(torch.where(dropped, CLASSES, label))[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Diffusion(Stochastic):
    """A denoiser that adds the noise itself and returns its error for every sample."""

    def __init__(self, num_layers=4):
        super().__init__(num_layers, drop_path=0.0, dropout=0.0)
        self.time = nn.Embedding(STEPS, DIM)
        self.head = nn.Linear(DIM, 6)

    def forward(self, image):
        noise = torch.randn_like(image)
        t = torch.randint(0, STEPS, (image.shape[0],), device=image.device)
        level = ((t + 1) / (STEPS + 1)).to(image.dtype)[:, None, None]
        x = self.patch((1 - level) * image + level * noise) + self.time(t)[:, None]
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x) - noise) ** 2).flatten(1).mean(1)


class LeftOut(Block):
    """One number for all samples decides whether a block is left out."""

    def forward(self, x):
        return super().forward(x) if torch.rand(()) < 0.6 else 1.0 * x


class LayerDrop(Stochastic):
    """Blocks that are left out for all samples, by themselves."""

    def __init__(self, num_layers=4):
        super().__init__(num_layers, drop_path=0.0, dropout=0.0)
        self.layers = nn.ModuleList(LeftOut(0.0, 0.0) for _ in range(num_layers))


class Skipping(LayerDrop):
    """Blocks that are not called at all."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(0.0, 0.0) for _ in range(num_layers))

    def forward(self, image):
        x = self.patch(image)
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                x = layer(x)
        return self.head(x.mean(1))


class Weighed(LayerDrop):
    """Three numbers for all samples."""

    def forward(self, image):
        return super().forward(image) * torch.rand(3).sum()


class Recurrent(Stochastic):
    """Recurrent layers that drop between each other, samples along either dim."""

    def __init__(self, num_layers=4):
        super().__init__(num_layers, drop_path=0.0, dropout=0.0)
        self.lstm = nn.LSTM(DIM, DIM, 2, dropout=0.3, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(2 * DIM, DIM, 3, dropout=0.3)

    def forward(self, image):
        x, _ = self.lstm(self.patch(image))
        x, _ = self.gru(x.transpose(0, 1))
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def class_loss(logits, target):
    return F.cross_entropy(logits, target, reduction="sum"), target.numel()


def noisy_class_loss(logits, target):
    """Labels that are flipped at random."""
    flipped = torch.rand(target.shape[0]) < 0.2
    return class_loss(logits, torch.where(flipped, (target + 1) % CLASSES, target))


def error_loss(error, target):
    return error.sum(), target.numel()


def images(num=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, 4, 6, generator=generator, dtype=torch.float64), torch.arange(num) % CLASSES
