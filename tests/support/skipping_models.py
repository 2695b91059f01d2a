"""Models whose stages send each other different values: several, shorter ones, ones of another dtype."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn


class Block(nn.Module):
    """A residual block of an MLP that may return every second position alone, or bfloat16."""

    def __init__(self, dim: int, *, halves: bool = False, narrows: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.halves, self.narrows = halves, narrows

    def forward(self, x_BSD):
        x_BSD = x_BSD.to(self.up.weight.dtype)
        y_BSD = x_BSD + self.down(torch.relu(self.up(x_BSD)))
        y_BSD = y_BSD[:, ::2] if self.halves else y_BSD
        return y_BSD.bfloat16() if self.narrows else y_BSD


class Skipping(nn.Module):
    """A model over token numbers.

    Args:
        kept: Blocks whose results the head adds: values that skip all stages between.
        squared: Blocks behind which the forward itself multiplies all positions with each other.
        halving: Blocks behind which half of the positions is left.
        narrowing: Blocks that return bfloat16.
        frozen: Blocks that are not trained, the embedding neither where the first is not.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        vocab_size: int = 64,
        dim: int = 32,
        kept: Collection[int] = (),
        squared: Collection[int] = (),
        halving: Collection[int] = (),
        narrowing: Collection[int] = (),
        frozen: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.kept, self.squared = frozenset(kept), frozenset(squared)
        self.tokens, self.output = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.layers = nn.ModuleList(
            Block(dim, halves=index in halving, narrows=index in narrowing) for index in range(num_layers)
        )
        for index in frozen:
            self.layers[index].requires_grad_(False)
        self.tokens.requires_grad_(0 not in frozen)

    def forward(self, tokens_BS):
        x_BSD, kept = self.tokens(tokens_BS), []
        for index, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD)
            if index in self.kept:
                kept.append(x_BSD.sin())
            if index in self.squared:
                x_BSD = torch.bmm(torch.bmm(x_BSD, x_BSD.transpose(1, 2)).softmax(-1), x_BSD)
        x_BSD = sum(kept, x_BSD).to(self.output.weight.dtype)
        return self.output(x_BSD.repeat_interleave(tokens_BS.shape[1] // x_BSD.shape[1], 1))
