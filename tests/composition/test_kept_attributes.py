"""What modules keep in attributes between forwards: forwards of composer3d's own and recomputations leave it alone."""

from __future__ import annotations

import random
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.scheduling.pipeline.division import divide_straight
from composer3d_plugins.scheduling.pipeline.traced_split import divide_traced
from support.models import VOCAB, composed, mean_loss, mine, unpadded
from torch import nn

from composer3d import ManifestError, TransformError
from composer3d.propagation import Call, KeptState, on_meta
from composer3d.testing import run_ranks

DIM = 8


class Keeping(nn.Module):
    """Attention and a feed-forward, scaled by a counter, a draw of Python's and a draw of a generator of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.calls, self.drawn = 0, torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        scale = self.calls / 4 * random.random() * torch.rand((), generator=self.drawn)
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x))) * scale


class Written(nn.Module):
    """A feed-forward with a moving average that it writes to in its place, and a draw of numpy's."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.average = torch.zeros(DIM)

    def forward(self, x):
        self.average.mul_(0.5).add_(x.detach().mean((0, 1)))
        hidden = torch.tanh(self.up(x + self.average.clone()))
        return x + self.down(hidden) * torch.full((), np.random.randn())


class Remembering(nn.Module):
    """A feed-forward that adds what it kept of the call before."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.memory, self.past = None, deque(maxlen=2)

    def forward(self, x):
        hidden = torch.tanh(self.up(x if self.memory is None else x + 0.1 * self.memory))
        self.memory = x.detach().mean(0, keepdim=True)
        self.past.append(float(len(self.past)))
        return x + self.down(hidden) * (1 + sum(self.past))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


class Carrying(Model):
    """What the end computes, the next forward begins with."""

    def __init__(self):
        super().__init__(Remembering)
        self.last = None

    def forward(self, tokens):
        x = self.tok(tokens)
        x = x if self.last is None else x + self.last
        for layer in self.layers:
            x = layer(x)
        self.last = x.detach().mean(0, keepdim=True)
        return self.out(x) + 0.0


class Counted(nn.Linear):
    """A block that counts its own calls, its parent's (in a list), or fills a cache that all blocks share."""

    def __init__(self, parent):
        super().__init__(DIM, DIM)
        self.parent, self.own = (parent,), 0

    def forward(self, x):
        (parent,), self.own = self.parent, self.own + 1
        if parent.where == "in a block":
            parent.plain["calls"] += 1
        if parent.where == "flag":
            parent.flag = True
        parent.cache(x)
        return super().forward(x)


class State:
    calls = 0


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq_len = 0

    def forward(self, x):
        if self.seq_len < x.shape[1]:
            self.seq_len = x.shape[1]
        return self.seq_len


class Counting(nn.Module):
    """A counter that scales what the blocks add; counted before them or behind them."""

    def __init__(self, where, num_layers=2):
        super().__init__()
        self.where, self.number, self.plain, self.flag = where, 0, {"calls": 0}, False
        self.state, self.cache = State(), Cache()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Counted(self) for _ in range(num_layers))
        self.register_buffer("calls", torch.zeros(()))
        if where == "hook":
            self.layers[0].register_forward_pre_hook(lambda block, args: setattr(self, "number", self.number + 1))

    def forward(self, tokens):
        if self.where == "before":
            self.calls += 1
        if self.where == "number before":
            self.number += 1
        self.flag = False
        x = self.tok(tokens)
        for index, layer in enumerate(self.layers):
            if self.where != "schedule" or self.number <= index:
                x = layer(x) * (1 + (self.calls + self.number + self.plain["calls"] + self.state.calls) / 4 + self.flag)
        if self.where in ("number behind", "schedule"):
            self.number += 1
        if self.where == "list behind":
            self.plain["calls"] += 1
        if self.where == "object behind":
            self.state.calls += 1
        if self.where == "behind":
            self.calls += 1
        if self.where == "replaced behind":
            self.calls = self.calls + 1
        return self.out(x) + 0.0


def made(block, factory=Model):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Model(block) if factory is Model else factory()


def one_device(block, num_microbatches, factory=Model):
    model = made(block, factory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    random.seed(1)
    np.random.seed(1)
    for seed in range(3):
        tokens, targets = unpadded(num_sequences=4, seq_len=6, seed=seed)
        parts = zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
        values = [mean_loss(model(inputs), wanted) / num_microbatches for inputs, wanted in parts]
        sum(values).backward()
        losses.append(sum(values).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def composed_losses(text, block, num_microbatches, factory=Model):
    text += f"[train]\nmicrobatch = {4 // num_microbatches}\n"
    run = composed(text, made(block, factory), loss_fn=mean_loss, example=((torch.zeros(2, 6, dtype=torch.int64),), {}))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    losses = []
    random.seed(1)
    np.random.seed(1)
    for seed in range(3):
        tokens, targets = unpadded(num_sequences=4, seq_len=6, seed=seed)
        losses.append(run.forward_backward(mine(run, tokens), target=mine(run, targets)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


RECOMPUTED = "[scheduling.activation_checkpoint]\nmode = "
LAYOUTS = {
    "full": (1, RECOMPUTED + '"full"\n', 1),
    "selective": (1, RECOMPUTED + '"selective"\n', 1),
    "sqrt": (1, RECOMPUTED + '"sqrt"\n', 1),
    "budget": (1, RECOMPUTED + '"budget"\nbudget_fraction = 0.5\n', 1),
    "pipeline": (2, "[mesh]\npp = 2\n[scheduling.pipeline]\n", 2),
    "tensor": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n", 1),
    "context": (2, "[mesh]\ncp = 2\n[sharding.context_parallel]\n", 1),
}


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pipeline"])
def test_counters_and_draws_are_one_devices(layout):
    size, text, num_microbatches = LAYOUTS[layout]
    (wanted,) = run_ranks(one_device, 1, Keeping, num_microbatches)
    for losses in run_ranks(composed_losses, size, text, Keeping, num_microbatches):
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "context"])
def test_memories_are_one_devices(layout):
    size, text, num_microbatches = LAYOUTS[layout]
    (wanted,) = run_ranks(one_device, 1, Remembering, num_microbatches)
    for losses in run_ranks(composed_losses, size, text, Remembering, num_microbatches):
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("context", "pipeline")])
def test_averages_that_are_written_in_place_are_one_devices(layout):
    size, text, num_microbatches = LAYOUTS[layout]
    (wanted,) = run_ranks(one_device, 1, Written, num_microbatches)
    for losses in run_ranks(composed_losses, size, text, Written, num_microbatches):
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("where", ["behind", "replaced behind"])
def test_a_counter_that_not_every_stage_comes_to_is_refused(where):
    for message in run_ranks(refused, 2, LAYOUTS["pipeline"][1] + 'split = "tracer"\n', partial(Counting, where)):
        assert (
            '[scheduling.pipeline] the model writes into "calls" in "out" or the code before it, and "layers.1" or the '
            "code before it uses it: in a pipeline these are different stages, and that which uses it has a copy that "
            "nobody writes; write it before the first block (every stage runs what comes before its own blocks), or "
            "train without [scheduling.pipeline]"
        ) in message


@pytest.mark.parametrize("where", ["before", "number before"])
def test_a_counter_that_every_stage_comes_to_is_one_devices(where):
    size, text, num_microbatches = LAYOUTS["pipeline"]
    counting = partial(Counting, where)
    (wanted,) = run_ranks(one_device, 1, None, num_microbatches, counting)
    for losses in run_ranks(composed_losses, size, text, None, num_microbatches, counting):
        assert losses == pytest.approx(wanted, abs=1e-12)


def refused(text, factory=Carrying):
    with pytest.raises(ManifestError) as raised:
        composed(text, factory(), loss_fn=mean_loss)
    return str(raised.value)


def changed(divide, where):
    """Return which attribute is changed where not every stage that uses it comes."""
    blocks = [f"layers.{index}" for index in range(4)]
    try:
        divide(Counting(where, 4), blocks, ((torch.zeros(2, 6, dtype=torch.int64),), {}), lambda *_: (0, 2))
    except TransformError as error:
        assert "a plain attribute, in" in str(error) and "change it before the first block" in str(error)
        return str(error).split('"')[1]
    return None


@pytest.mark.parametrize("divide", [divide_straight, divide_traced])
@pytest.mark.parametrize(
    ("where", "attribute"),
    [
        ("nowhere", None),  # but in each block its own, and in a cache that all blocks fill
        ("number before", None),
        ("number behind", "number"),
        ("schedule", "number"),
        ("list behind", "plain"),
        ("object behind", "state.calls"),
        ("in a block", "plain"),
        ("flag", "flag"),
        ("hook", "number"),
    ],
)
def test_plain_attributes_that_not_every_stage_changes_are_refused(divide, where, attribute):
    assert changed(divide, where) == attribute


@pytest.mark.parametrize("split", ["auto", "tracer"])
def test_a_value_that_the_end_leaves_for_the_beginning_is_refused(split):
    for message in run_ranks(refused, 2, LAYOUTS["pipeline"][1] + f'split = "{split}"\n'):
        assert 'the model leaves "last", which' in message
        assert "for its next forward, in which" in message and '"layers.0"' in message


def test_a_forward_on_meta_leaves_attributes_and_draws():
    block, call = Keeping(), Call(args=(torch.empty(2, 6, DIM, device="meta"),), kwargs={})
    random.seed(2)
    on_meta(block, call)
    assert block.calls == 0 and block.drawn.initial_seed() == 3
    drawn = random.random()
    random.seed(2)
    assert drawn == random.random()
    memory = Remembering()
    on_meta(memory, call)
    assert memory.memory is None and list(memory.past) == []


def test_containers_and_tensors_are_given_back_what_they_held():
    module = nn.Module()
    module.kept = {"a": [torch.ones(2)], "b": (1, {"c"})}
    shared, inner = module.kept, module.kept["a"]
    state = KeptState([module])
    inner[0].add_(1)
    inner.append(2)
    module.kept["b"][1].add("d")
    module.kept = {}
    module.late = 1
    with state.again():
        assert module.kept is shared and module.kept["b"] == (1, {"c"}) and not hasattr(module, "late")
        assert module.kept["a"][0].tolist() == [1.0, 1.0] and len(module.kept["a"]) == 1
    assert module.kept == {} and module.late == 1 and inner[0].tolist() == [2.0, 2.0]
    state.restore()
    assert module.kept is shared and inner[0].tolist() == [1.0, 1.0] and len(inner) == 1
