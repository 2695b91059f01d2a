"""A convolutional classifier, and images of stripes in four directions.

Shapes: B images, C channels, H x W pixels.
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x_BCHW):
        return x_BCHW + torch.relu(self.norm(self.conv(x_BCHW)))


class Classifier(nn.Module):
    def __init__(self, num_classes, width=16, num_layers=2):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x_BCHW):
        x_BCHW = torch.relu(self.stem(x_BCHW))
        for layer in self.layers:
            x_BCHW = layer(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))


def stripes(num_images, size):
    """Return images of stripes with noise; the label is their direction."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (num_images,), generator=generator)
    angles = labels * math.pi / 4
    across, down = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy")
    phase = torch.rand(num_images, generator=generator) * 2 * math.pi
    along = across * angles.cos()[:, None, None] + down * angles.sin()[:, None, None]
    images = torch.sin(1.5 * along + phase[:, None, None])
    noise = torch.randn(images.shape, generator=generator)
    return TensorDataset((images + 0.3 * noise)[:, None], labels)
