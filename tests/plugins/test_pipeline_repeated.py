"""Blocks that a pipeline's forward on meta does not run: the record is the same, and whatever may differ runs."""

import dataclasses

import pytest
import torch
from composer3d_plugins.scheduling.pipeline.block_trace import observe
from torch import nn

from composer3d.models.llama import llama

WIDTH, BLOCKS = 8, 7
NAMES = [f"blocks.{number}" for number in range(BLOCKS)]
EXAMPLE = ((torch.zeros(2, 3, dtype=torch.int64, device="meta"),), {})
# Of which nothing in a module knows.
RAN, KEPT = [], []


class Block(nn.Module):
    """Reads a parameter, a buffer and an attribute of its own, and says that it has run."""

    def __init__(self, number):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.factor = 2.0

    def forward(self, x_BSD, extra=None):
        RAN.append(self)
        return x_BSD + self.factor * self.linear(self.norm(x_BSD)) * self.scale


class Model(nn.Module):
    def __init__(self, block=Block, tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.blocks = nn.ModuleList(block(number) for number in range(BLOCKS))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        for number, block in enumerate(self.blocks):
            x_BSD = self.called(block, x_BSD, number)
        return self.head(x_BSD)

    def called(self, block, x_BSD, number):
        return block(x_BSD)


def told_apart(model):
    """Return the model with a number in every block, by which none equals another."""
    for number, block in enumerate(model.blocks):
        block.told = number
    return model


def record(model, names=NAMES, example=EXAMPLE):
    RAN.clear()
    KEPT.clear()
    seen = observe(model, names, example)
    fields = {field.name: getattr(seen, field.name) for field in dataclasses.fields(seen) if field.name != "skeleton"}
    return fields, len(RAN)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_not_run_is_recorded_as_if_it_had(tied):
    found, runs = record(Model(tied=tied))
    whole, all_runs = record(told_apart(Model(tied=tied)))
    assert found == whole
    # The first, the last, and the one between whose record stands for the others.
    assert (runs, all_runs) == (3, BLOCKS)
    assert found["uses"]["blocks.4.linear.weight"] == {4: 1} and found["needs"]["blocks.4.norm.bias"] == {4}
    assert found["buffers"]["blocks.4.scale"] == {4} and found["costs"][4] == found["costs"][0] > 0


def test_a_decoder_is_recorded_as_if_all_of_it_had_run():
    sizes = {"dim": 32, "num_layers": BLOCKS, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    names, models = [f"layers.{number}" for number in range(BLOCKS)], [llama(**sizes), llama(**sizes)]
    for number, block in enumerate(models[1].layers):
        block.told = number
    assert record(models[0], names)[0] == record(models[1], names)[0]


def test_blocks_of_two_forms_run_once_of_each():
    class Other(Block):
        def forward(self, x_BSD, extra=None):
            return super().forward(torch.sin(x_BSD))

    model = Model(lambda number: (Block, Other)[number % 2](number))
    found, runs = record(model)
    assert runs == 4
    assert found == record(told_apart(model))[0]


def inner_kept(self, x_BSD, extra=None):
    KEPT.append(self.norm(x_BSD))
    return x_BSD + self.linear(KEPT[-1])


def output_kept(self, x_BSD, extra=None):
    KEPT.append(x_BSD + self.linear(x_BSD))
    return KEPT[-1]


def tuple_kept(self, x_BSD, extra=None):
    KEPT.append((x_BSD + self.linear(x_BSD), None))
    return KEPT[-1]


def attribute_kept(self, x_BSD, extra=None):
    self.last = self.linear(x_BSD)
    return x_BSD + self.last


def buffer_written(self, x_BSD, extra=None):
    self.scale.mul_(0.5)
    return x_BSD + self.linear(x_BSD)


def counted(self, x_BSD, extra=None):
    self.factor += 1.0
    return x_BSD + self.linear(x_BSD)


def read(self, x_BSD, extra=None):
    return x_BSD + self.linear(x_BSD) if self.scale.sum() > 0 else x_BSD


def passed(self, x_BSD, extra=None):
    return x_BSD


def viewed(self, x_BSD, extra=None):
    return (x_BSD + self.linear(x_BSD)).transpose(0, 1)[1:].transpose(0, 1) if x_BSD.shape[1] > BLOCKS else x_BSD


@pytest.mark.parametrize(
    "forward",
    [inner_kept, output_kept, tuple_kept, attribute_kept, buffer_written, counted, read, passed, viewed],
    ids=lambda forward: forward.__name__,
)
def test_a_block_that_does_more_than_compute_is_run_each_time(forward):
    class Doing(Block):
        def forward(self, x_BSD, extra=None):
            RAN.append(self)
            return forward(self, x_BSD, extra)

    class First(Model):
        def called(self, block, x_BSD, number):
            output = block(x_BSD)
            return output[0] if isinstance(output, tuple) else output

    # Of what is left for the next forward there is a second one.
    assert record(First(Doing))[1] in (BLOCKS, 2 * BLOCKS)


def with_other_argument(block, x_BSD, number):
    return block(x_BSD, torch.ones(3))


def with_other_number(block, x_BSD, number):
    return block(x_BSD, number)


def with_other_length(block, x_BSD, number):
    return block(torch.cat([x_BSD, x_BSD[:, :1]], 1))


def with_other_dtype(block, x_BSD, number):
    with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
        return block(x_BSD)


@pytest.mark.parametrize(
    ("call", "most"),
    [(with_other_argument, BLOCKS), (with_other_number, BLOCKS), (with_other_length, BLOCKS), (with_other_dtype, 4)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_call_with_something_else_is_run(call, most):
    class Calling(Model):
        def called(self, block, x_BSD, number):
            return call(block, x_BSD, number)

    found, runs = record(Calling())
    assert runs == most
    assert found == record(told_apart(Calling()))[0]


def test_a_block_with_something_of_its_own_is_run():
    def bias_gone(block):
        block.linear.bias = None

    def other_mode(block):
        block.norm.eval()

    def other_factor(block):
        block.factor = 3.0

    def hooked(block):
        block.norm.register_forward_hook(lambda module, args, output: 2 * output)

    def other_buffer(block):
        block.scale = torch.ones(1)

    for change in (bias_gone, other_mode, other_factor, hooked, other_buffer):
        model, expected = Model(), told_apart(Model())
        for each in (model, expected):
            change(each.blocks[4])
        found, runs = record(model)
        assert runs == 4, change.__name__
        assert found == record(expected)[0], change.__name__
