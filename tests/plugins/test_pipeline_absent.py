"""Decisions by the batch that the forward on meta did not take: their parameters are there, or named in an error."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.scheduling.pipeline.absent import Absent
from composer3d_plugins.scheduling.pipeline.block_trace import observe
from composer3d_plugins.scheduling.pipeline.stage import build_stage
from support.models import VOCAB, Block
from support.pipeline_models import DIM, assert_equal_to_one_device, pipelined_step
from torch import nn

from composer3d.errors import ComposerError
from composer3d.testing import run_ranks

ONE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
TRACED = ONE + 'split = "tracer"\n'


def is_other(tokens):
    """Tell true of every batch; what is read of tensors without values is true, so there it is false."""
    return not bool(tokens.sum() == 0)


class Base(nn.Module):
    """Embedding, blocks and head; subclasses decide by the batch at one place each."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(self.block() for _ in range(4))

    def block(self):
        return Block(DIM)

    def run(self, x, tokens):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens):
        return self.out(self.run(self.tok(tokens), tokens)) + 0.0


class Choice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.usual, self.other = nn.Linear(DIM, width), nn.Linear(DIM, width)

    def forward(self, x, tokens):
        return (self.other if is_other(tokens) else self.usual)(x)


class InHead(Base):
    def __init__(self):
        super().__init__()
        self.out = Choice(VOCAB)

    def forward(self, tokens):
        return self.out(self.run(self.tok(tokens), tokens), tokens) + 0.0


class InBlocks(Base):
    def block(self):
        return Choice(DIM)

    def run(self, x, tokens):
        for layer in self.layers:
            x = x + torch.tanh(layer(x, tokens))
        return x


class BetweenHeads(Base):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.run(self.tok(tokens), tokens)
        return (self.other if is_other(tokens) else self.out)(x) + 0.0


class OwnScale(Base):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 2.0))

    def run(self, x, tokens):
        x = super().run(x, tokens)
        return x * self.scale if is_other(tokens) else x


class Kept(Base):
    """What a module computed on the first stage, added on the last."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(DIM, DIM)

    def run(self, x, tokens):
        side = self.side(x)
        x = super().run(x, tokens)
        return x + side if is_other(tokens) else x


class Reading(nn.Module):
    def __init__(self, tok):
        super().__init__()
        self.inner, self.tok = Block(DIM), tok

    def forward(self, x, tokens):
        x = self.inner(x)
        return x + self.tok(tokens) if is_other(tokens) else x


class Embedded(Base):
    """Blocks that hold the embedding."""

    def block(self):
        return Reading(self.tok)

    def run(self, x, tokens):
        for layer in self.layers:
            x = layer(x, tokens)
        return x


class AlwaysReading(Reading):
    def forward(self, x, tokens):
        return self.inner(x) + 0.5 * self.tok(tokens)


class Always(Embedded):
    """Blocks that read the embedding in every forward."""

    def block(self):
        return AlwaysReading(self.tok)


class Repeated(Base):
    """One module called several times, on both stages: its parameters that no forward has used are on one."""

    def __init__(self):
        super().__init__()
        self.layers = Choice(DIM)

    def run(self, x, tokens):
        for _ in range(4):
            x = x + torch.tanh(self.layers(x, tokens))
        return x


@pytest.mark.parametrize("text", [ONE, TRACED])
@pytest.mark.parametrize("factory", [InHead, InBlocks, Always])
def test_modules_that_decide_have_all_that_they_may_need(text, factory):
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, factory))


COMPUTES = "the forward of this batch computes with {}, which another stage of the pipeline holds"


@pytest.mark.parametrize(
    ("text", "factory", "message"),
    [
        (ONE, BetweenHeads, COMPUTES.format('the parameter "other.weight"')),
        (TRACED, BetweenHeads, 'the forward of this batch did not call "out", as it did when the model was split'),
        (ONE, OwnScale, COMPUTES.format('the parameter "scale"')),
        (TRACED, OwnScale, COMPUTES.format('the parameter "scale"')),
        (ONE, Kept, COMPUTES.format('the parameter "tok.weight"')),
        (TRACED, Kept, COMPUTES.format('what "side" returns')),
        (ONE, Embedded, COMPUTES.format('the parameter "tok.weight"')),
        (TRACED, Embedded, COMPUTES.format('the parameter "tok.weight"')),
        (TRACED, Repeated, COMPUTES.format('the parameter "layers.other.weight"')),
    ],
)
def test_what_another_stage_holds_is_named(text, factory, message):
    with pytest.raises(ComposerError) as caught:
        run_ranks(pipelined_step, 2, text, factory)
    assert message in str(caught.value)


class Copied(OwnScale):
    """The scale is copied into a tensor of the forward's own, through a view of it."""

    def run(self, x, tokens):
        x = Base.run(self, x, tokens)
        scale = x.new_ones(DIM)
        if is_other(tokens):
            scale.view(1, DIM)[:, :].copy_(self.scale.detach())
        return x * scale


class Cleaned(OwnScale):
    """What the scale was copied into is cleared of NaN before it is used."""

    def run(self, x, tokens):
        x = Base.run(self, x, tokens)
        scale = x.new_ones(DIM)
        if is_other(tokens):
            scale.copy_(self.scale.detach())
        return x * torch.nan_to_num(scale, nan=1.0)


class Compared(OwnScale):
    """What the scale was copied into decides which elements are doubled."""

    def run(self, x, tokens):
        x = Base.run(self, x, tokens)
        scale = x.new_ones(DIM)
        if is_other(tokens):
            scale.copy_(self.scale.detach())
        return torch.where(scale > 1.0, 2.0 * x, x)


class Masked(OwnScale):
    """The scale decides which elements of a mask are set."""

    def run(self, x, tokens):
        x = Base.run(self, x, tokens)
        mask = torch.zeros(DIM, dtype=torch.bool)
        if is_other(tokens):
            mask.copy_(self.scale.detach() > 1.0)
        return torch.where(mask, 2.0 * x, x)


class Discarded(Kept):
    """What a module of the first stage computed is written into tensors that nothing reads on the last."""

    def run(self, x, tokens):
        room = x.new_zeros(2, *x.shape)
        room[0], room[1] = x, self.side(x)
        return Base.run(self, room[0] + room[1], tokens)


class Buffered(Base):
    """A buffer that the first block's stage uses, and another way of the last one's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((DIM,), 2.0))

    def run(self, x, tokens):
        x = Base.run(self, x * self.scale, tokens)
        return x * self.scale if is_other(tokens) else x


@pytest.mark.parametrize("text", [ONE, TRACED])
def test_what_is_written_and_not_read_stops_nothing(text):
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, Discarded))


@pytest.mark.parametrize("text", [ONE, TRACED])
@pytest.mark.parametrize(
    ("factory", "source"),
    [
        (Copied, 'the parameter "scale"'),
        (Cleaned, 'the parameter "scale"'),
        (Compared, 'the parameter "scale"'),
        (Masked, 'the parameter "scale"'),
        (Buffered, 'the buffer "scale"'),
    ],
)
def test_what_is_written_into_a_tensor_of_the_models_own_is_named(text, factory, source):
    with pytest.raises(ComposerError) as caught:
        run_ranks(pipelined_step, 2, text, factory)
    assert COMPUTES.format(source) in str(caught.value)


class Listed(nn.Module):
    """A list, which is no module, holds a parameter of the last block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.shown = [self.blocks[3].weight]

    def forward(self, x_BD):
        for block in self.blocks:
            x_BD = block(x_BD)
        return x_BD


def test_a_parameter_of_another_stage_that_a_list_holds_is_absent_and_no_copy():
    model = Listed()
    seen = observe(model, [f"blocks.{number}" for number in range(4)], ((torch.zeros(2, 4, device="meta"),), {}))
    first, last = (build_stage(model, seen, start=start, end=start + 2, device=torch.device("cpu")) for start in (0, 2))
    assert last.shown[0] is model.blocks[3].weight is last.blocks[3].weight
    assert isinstance(first.shown[0], Absent) and first.shown[0].source == 'the parameter "blocks.3.weight"'
    assert [name for name, _ in first.named_parameters()] == [
        f"blocks.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    ]
    assert first.blocks[0].weight is model.blocks[0].weight
