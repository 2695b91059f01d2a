"""Models whose own forward recomputes its blocks, by torch's checkpoints."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.models import Net
from support.pipeline_models import assert_equal_to_one_device, pipelined_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from composer3d.errors import ComposerError
from composer3d.testing import run_ranks

ONE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
LOOP = ONE + 'schedule = "Interleaved1F1B"\n'
RECOMPUTING = partial(checkpoint, use_reentrant=False)
TRACED = ONE + 'split = "tracer"\n'


class Recomputed(Net):
    """Blocks called through checkpoints."""

    def __init__(self, *, call=RECOMPUTING, num_layers=4):
        super().__init__(num_layers=num_layers)
        self.call = call

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.out(self.norm(x)) + 0.0


class Inside(nn.Module):
    """A block that recomputes itself."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)


class Foreign(torch.autograd.Function):
    """Recomputation as another library has it."""

    @staticmethod
    def forward(ctx, block, x):
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


class Pairs(Recomputed):
    """One checkpoint for two blocks, which stages do not part, though there are as many stages as blocks."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = self.call(lambda x, first=first, second=second: second(first(x)), x)
        return self.out(self.norm(x)) + 0.0


class Attributes(nn.Module):
    """Blocks without a list, of which the parts are called one after the other, each block by a checkpoint."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.first, self.second = (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in (self.first, self.second):
            x = RECOMPUTING(block, x)
        return self.out(x)


def recomputing_inside():
    model = Net(num_layers=4)
    model.layers = nn.ModuleList(map(Inside, model.layers))
    return model


@pytest.mark.parametrize("text", [ONE, LOOP, TRACED])
def test_gradients_equal_one_device(text):
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, Recomputed))


@pytest.mark.parametrize("factory", [Pairs, partial(Pairs, num_layers=6), Attributes])
def test_stages_do_not_begin_within_what_a_checkpoint_recomputes(factory):
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, ONE, factory))


@pytest.mark.parametrize(
    ("factory", "caller"),
    [
        (partial(Recomputed, call=partial(checkpoint, use_reentrant=True)), "the forward"),
        (recomputing_inside, 'the forward of "layers.0"'),
    ],
)
@pytest.mark.parametrize("text", [ONE, TRACED])
def test_reentrant_checkpoints_are_refused_before_a_step(text, factory, caller):
    with pytest.raises(ComposerError) as caught:
        run_ranks(pipelined_step, 2, text, factory)
    assert (
        f"{caller} calls torch.utils.checkpoint with use_reentrant=True, whose backward gives no gradient to another "
        "stage; write use_reentrant=False, or leave recomputation to [scheduling.activation_checkpoint]"
    ) in str(caught.value)


class Transformed(Recomputed):
    """Calls its blocks one sample at a time."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = torch.func.vmap(layer)(x)
        return self.out(self.norm(x))


@pytest.mark.parametrize(
    ("text", "factory", "said"),
    [
        (
            ONE,
            partial(Recomputed, call=Foreign.apply),
            '"layers.0" is called without a graph by the autograd function "Foreign"; and where values are traced, the '
            'autograd function "Foreign" calls "layers.1" in its forward, without a graph, and no gradient would '
            "travel from there to another stage; call modules outside of it, or split where it is not at work",
        ),
        (TRACED, partial(Recomputed, call=Foreign.apply), 'the autograd function "Foreign" calls "layers.1" in its'),
        (ONE, Transformed, 'the forward calls "layers.0" inside of a transform of torch.func (vmap, grad, jvp), which'),
        (TRACED, Transformed, 'the forward calls "layers.0" inside of a transform of torch.func (vmap, grad, jvp), '),
    ],
)
def test_calls_that_cannot_be_divided_are_refused_with_what_makes_them(text, factory, said):
    with pytest.raises(ComposerError) as caught:
        run_ranks(pipelined_step, 2, text, factory)
    assert "[scheduling.pipeline]" in str(caught.value)
    assert said in str(caught.value)
