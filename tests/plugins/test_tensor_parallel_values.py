"""Models whose code reads values of its inputs before any block: those of the example are there in the dry run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

DIM, VOCAB = 8, 16
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Packed(nn.Module):
    """A recurrent network over sequences of lengths of which none may be 0."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Pair() for _ in range(2))
        self.lstm, self.head = nn.LSTM(DIM, DIM, batch_first=True), nn.Linear(DIM, 5)

    def forward(self, tokens, lengths):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


def gradients():
    """Return the largest error of a gradient beside one device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    alone = Packed()
    torch.manual_seed(0)
    model = Packed()
    tokens, lengths, targets = torch.randint(1, VOCAB, (4, 6)), torch.tensor([6, 4, 3, 2]), torch.arange(4)
    F.cross_entropy(alone(tokens, lengths), targets).backward()
    example = ((tokens[:2], lengths[:2]), {})
    with (
        composer3d.compose(model, write_manifest(TP), loss_fn=F.cross_entropy, example=example) as run,
        run.step(0),
    ):
        run.forward_backward(tokens, lengths, target=targets)
        own = {name: full(parameter.grad) for name, parameter in run.named_parameters()}
        placements = {name: str(getattr(parameter, "placements", "")) for name, parameter in run.named_parameters()}
    return max(float((own[name] - p.grad).abs().max()) for name, p in alone.named_parameters()), placements


def test_lengths_that_code_reads_are_those_of_the_example():
    for error, placements in run_ranks(gradients, 2):
        assert error < 1e-12
        assert "Shard(dim=0)" in placements["layers.0.up.weight"]
