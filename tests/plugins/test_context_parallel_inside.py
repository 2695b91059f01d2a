"""Sequences that begin inside of a model, and windows of neighbours: shards of any length, or gathered."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.family_models import VOCAB, ViT
from support.sequence_models import Language
from support.sequence_steps import context, padded_batch, sequence_steps
from torch import nn

from composer3d import RankError
from composer3d.testing import run_ranks


class Pooled(ViT):
    """The mean of all positions in place of the class token's."""

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x)).mean(1))


class Encoded(nn.Module):
    """torch's own encoder over patches."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, VOCAB)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images):
        return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2))[:, 0])


class ConditionedBlock(nn.Module):
    """A block whose norms are shifted and scaled, and whose branches are weighted, by a condition (adaLN-Zero)."""

    def __init__(self):
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 6 * 16)
        self.qkv, self.proj, self.up, self.down = (
            nn.Linear(16 * i, 16 * o) for i, o in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x, condition):
        shift, scale, gate, shift_2, scale_2, gate_2 = F.silu(self.modulation(condition))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.down(F.gelu(self.up(self.norm(x) * (1 + scale_2) + shift_2)))


class Conditioned(nn.Module):
    """Patches in blocks that a class conditions; what its head says of each, weighted by its place."""

    def __init__(self, num_patches=16):
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.randn(1, num_patches, 16))
        self.condition, self.blocks = nn.Embedding(VOCAB, 16), nn.ModuleList(ConditionedBlock() for _ in range(2))
        self.head, self.weights = nn.Linear(16, VOCAB), nn.Parameter(torch.randn(1, num_patches, 1))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        condition = self.condition((images[:, 0, 0, 0] > 0).long())
        for block in self.blocks:
            x = block(x, condition)
        return (self.head(x) * self.weights).sum(1)


class Windows(Language):
    """Attention within windows of neighbours beside attention over everything."""

    width = 4

    def attend(self, q, k, v, tokens):
        windows = [x.unflatten(2, (-1, self.width)) for x in (q, k, v)]
        return self.within(*windows).flatten(2, 3) + F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def within(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class WideWindows(Windows):
    """Windows that reach over two chunks of a balanced sequence."""

    width = 8


class WrittenOut(WideWindows):
    """The same with a softmax by hand."""

    def within(self, q, k, v):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Merging(Language):
    """Features of neighbours side by side, as merged patches have them, and repeated positions."""

    def mixed(self, block, x, tokens):
        pairs = x.unflatten(1, (-1, 2)).flatten(2).cumsum(-1).unflatten(-1, (2, -1)).flatten(1, 2)
        wide = x.view(x.shape[0], 2, -1).softmax(-1).view_as(x)
        return super().mixed(block, x, tokens) + pairs + wide + x.repeat_interleave(3, 1).unflatten(1, (-1, 3)).mean(2)

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v)


def images(height, width):
    """Return a function that makes images and a class for each."""

    def batch():
        generator = torch.Generator().manual_seed(3)
        x_BCHW = torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64)
        return (x_BCHW,), {}, torch.randint(0, VOCAB, (2,), generator=generator)

    return batch


def standard():
    """Return a transformer over 14 x 14 patches and a class token: 197 positions."""
    return ViT(patch=16, size=(224, 224))


def uneven():
    """Return one over 12 patches and a class token."""
    return ViT(size=(12, 16))


def assert_equal_to_one_device(degree, cases):
    found = run_ranks(sequence_steps, degree, cases, timeout_s=600)
    wrong = [(at, each[:3]) for result in found for at, each in enumerate(result) if not max(each[:2]) <= 1e-12]
    assert wrong == []
    return [each[3] for each in found[0]]


def test_images_whose_sequence_is_made_by_the_model():
    pooled = (Pooled, context(), images(12, 20))
    cases = [(uneven, context(method), images(12, 16)) for method in ("gather", "ring", "ulysses")]
    gather, *_, counted = assert_equal_to_one_device(2, [*cases, (Encoded, context("ring"), images(12, 12)), pooled])
    # Beside two attentions the class token's position is taken of all, and one mean is.
    assert (gather["all_gather"][0], gather["reduce_scatter"][0]) == (5, 3)
    assert (counted["all_gather"][0], counted["reduce_scatter"][0]) == (5, 3)


@pytest.mark.parametrize("method", ["ring", pytest.param("usp", marks=pytest.mark.slow)])
def test_197_positions_on_four_ranks(method):
    assert_equal_to_one_device(4, [(standard, context(method, degree=4), images(224, 224))])


TENSOR = context(mesh="tp = 2", more="[sharding.tensor_parallel]\n")
SHARDED_TWICE = context(mesh="tp = 2", more="[sharding.tensor_parallel]\nsequence_parallel = true\n")
STAGES = context("ring", mesh="pp = 2", more='[scheduling.pipeline]\nschedule = "GPipe"\n')
AGAIN = context("ulysses", mesh="dp_shard = 2", more="[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n")


@pytest.mark.parametrize(
    "text",
    [pytest.param(TENSOR, marks=pytest.mark.slow), STAGES, pytest.param(AGAIN, marks=pytest.mark.slow)],
    ids=["tensor", "stages", "recomputed"],
)
def test_unequal_shards_beside_other_axes(text):
    assert_equal_to_one_device(4, [(uneven, text, images(12, 16))])


@pytest.mark.parametrize(
    "text",
    [SHARDED_TWICE, pytest.param(f"{SHARDED_TWICE}[scheduling.activation_checkpoint]\n", marks=pytest.mark.slow)],
)
def test_a_sequence_that_begins_at_a_block_is_sharded_over_cp_before_it_is_over_tp(text):
    assert_equal_to_one_device(4, [(Conditioned, text, images(16, 16))])


@pytest.mark.slow
def test_positions_of_a_rank_that_tp_does_not_divide_are_refused_with_both_degrees():
    with pytest.raises(RankError) as caught:
        run_ranks(sequence_steps, 4, [(partial(Conditioned, 14), SHARDED_TWICE, images(8, 28))])
    said = "a rank's 7 positions of a sequence that cp = 2 shards do not divide by tp = 2, as sequence_parallel needs; "
    assert f"{said}choose a length that cp x tp = 4 divides" in str(caught.value)


BALANCED, CONTIGUOUS = context(), context(more="balanced = false\n")


@pytest.mark.parametrize(
    ("held", "gathered"),
    [
        ([(WideWindows, CONTIGUOUS)], [(WideWindows, BALANCED)]),
        pytest.param(
            [(Windows, BALANCED), (WrittenOut, CONTIGUOUS)],
            [(WrittenOut, BALANCED), (Merging, BALANCED)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["wide windows", "others"],
)
def test_windows_of_neighbours_are_sharded_where_ranks_hold_them(held, gathered):
    counted = assert_equal_to_one_device(2, [(factory, text, padded_batch) for factory, text in (*held, *gathered)])
    assert [each["all_gather"][0] for each in counted[: len(held)]] == [4] * len(held)
    assert all(each["all_gather"][0] > 4 for each in counted[len(held) :])
