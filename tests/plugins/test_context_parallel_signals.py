"""Context parallelism: signals and spectra, whose dim 1 is one of channels: the sequence begins after convolutions.

Shapes: B samples, C channels, L frames, S positions, D features.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.family_models import VOCAB, ViTBlock
from support.models import write_manifest
from support.sequence_steps import context, sequence_steps
from torch import Tensor, nn

import composer3d
from composer3d.errors import ManifestError
from composer3d.testing import run_ranks

D, FRAMES = 16, 32
TENSOR = context(mesh="tp = 2", more="[sharding.tensor_parallel]\n[sharding.fsdp2]\n")
STAGES = context(mesh="pp = 2", more='[sharding.fsdp2]\n[scheduling.pipeline]\nschedule = "GPipe"\n')
ALONE = context(more='others = "refuse"\n[sharding.fsdp2]\n')


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, others: Tensor, *, is_causal: bool = False) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q(x), self.k(others), self.v(others)))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.proj(heads.transpose(1, 2).reshape(x.shape))


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2, self.norm_3 = (nn.LayerNorm(D) for _ in range(3))
        self.own, self.cross = Attention(), Attention()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        y = y + self.own(self.norm(y), self.norm(y), is_causal=True)
        y = y + self.cross(self.norm_2(y), x)
        return y + self.down(F.gelu(self.up(self.norm_3(y))))


class Spoken(nn.Module):
    """Whisper's form: two convolutions of a spectrum, learned positions, and a decoder that attends to all of it."""

    def __init__(self, num_channels: int = 8) -> None:
        super().__init__()
        self.conv, self.conv_2 = nn.Conv1d(num_channels, D, 3, padding=1), nn.Conv1d(D, D, 3, stride=2, padding=1)
        self.positions, self.tokens = nn.Embedding(FRAMES // 2, D), nn.Embedding(VOCAB, D)
        self.encoder = nn.ModuleList(ViTBlock(D, 4) for _ in range(2))
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, x_BCL: Tensor, tokens: Tensor) -> Tensor:
        x = F.gelu(self.conv_2(F.gelu(self.conv(x_BCL)))).permute(0, 2, 1) + self.positions.weight
        for block in self.encoder:
            x = block(x)
        x, y = self.norm(x), self.tokens(tokens)
        for block in self.decoder:
            y = block(y, x)
        return self.head(y)


class Labelled(nn.Module):
    """A class for each second frame, of channels that a convolution takes, or a linear layer."""

    def __init__(self, *, is_linear: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, D) if is_linear else None
        self.conv = None if is_linear else nn.Conv1d(8, D, 3, stride=2, padding=1)
        self.blocks, self.head = nn.ModuleList(ViTBlock(D, 4) for _ in range(2)), nn.Linear(D, VOCAB)

    def forward(self, x_BCL: Tensor) -> Tensor:
        if self.conv is not None:
            x_BSD = self.conv(x_BCL).transpose(1, 2)
        else:
            x_BSD = self.linear(x_BCL[..., ::2].transpose(1, 2))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(x_BSD)


def spoken(num_channels: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, VOCAB, (2, 16), generator=generator) for _ in range(2))
    x_BCL = torch.randn(2, num_channels, FRAMES, generator=generator, dtype=torch.float64)
    return (x_BCL, tokens), {}, targets


def labelled() -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]:
    (x_BCL, _), _, targets = spoken(8)
    return (x_BCL,), {}, targets


@pytest.mark.parametrize(
    ("degree", "text"),
    [
        pytest.param(2, ALONE, id="cp alone, which gathers nothing"),
        pytest.param(4, TENSOR, id="beside tp"),
        pytest.param(4, STAGES, id="in stages", marks=pytest.mark.slow),
    ],
)
def test_channels_are_not_taken_for_positions(degree: int, text: str):
    cases = [
        *((partial(Spoken, num), text, partial(spoken, num)) for num in (8, 10)),  # of which cp divides one evenly
        *((partial(Labelled, is_linear=is_linear), text, labelled) for is_linear in (False, True)),
    ]
    found = run_ranks(sequence_steps, degree, cases)
    wrong = [(at, each[:3]) for result in found for at, each in enumerate(result) if not max(each[:2]) <= 1e-12]
    assert wrong == []


class Planes(nn.Module):
    """Convolutions over two dims, of no sequence in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).mean((2, 3)))


def told_of_planes() -> str:
    with pytest.raises(ManifestError) as refused:
        composer3d.compose(Planes(), write_manifest(context()), example=((torch.zeros(2, 3, 8, 12),), {}))
    return refused.value.problems[0].message + "; " + refused.value.problems[0].hint


def test_another_dim_of_the_inputs_is_named_where_none_is_taken_for_a_sequence():
    for told in run_ranks(told_of_planes, 2):
        assert told == (
            "context_parallel takes dim 1 of no input of the model for a sequence, of inputs of [2, 3, 8, 12], and "
            "finds no list of blocks between which one could be; state the repeated blocks: [model] blocks = "
            '"PATTERN"; '
            "if it is another dim of the inputs, write sequence_dim = 2 or 3"
        )
