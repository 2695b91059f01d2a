"""A model whose linear layers a precision plugin converts, beside one device on which torchao converted them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from composer3d.testing import count_collectives, full, run_ranks
from support.interrupted_runs import go_on
from support.models import VOCAB, composed, mine, seeded, sum_loss
from support.shared_worlds import in_one_world

SIZE, NUM_LAYERS, SEQ_LEN = 32, 2, 8
DATA_PARALLEL = [(1, [""]), (2, ["[sharding.fsdp2]\n", "[sharding.fsdp2]\nzero = 1\n", "[sharding.ddp]\n"])]
TP_PLAN = '[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + TP_PLAN
TP_FSDP = "[mesh]\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n" + TP_PLAN
PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 8\n"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wide(nn.Module):
    """Linear layers whose dims are multiples of 32, but for the last."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, SIZE)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(SIZE)
        self.out = nn.Linear(SIZE, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


def batch(num_sequences=16):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (num_sequences, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def inside(module, fqn):
    return isinstance(module, nn.Linear) and fqn.startswith("layers.")


@functools.cache
def reference(converted, chunks, num_steps, dtype=torch.float32):
    """Train one device, chunk by chunk as ranks do; return losses, the last gradients, and weights."""
    model = converted(seeded(Wide).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    tokens, targets = batch()
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, _ = sum_loss(model(part), wanted)
            (loss * (1 / targets.numel())).backward()
            total += float(loss.detach())
        losses.append(total / targets.numel())
        optimizer.step()
    named = dict(model.named_parameters())
    return losses, {name: plain(p.grad) for name, p in named.items()}, {name: plain(p) for name, p in named.items()}


def plain(tensor):
    """Return a tensor without a class of torchao's around it."""
    tensor = tensor.detach()
    return getattr(tensor, "_data", tensor).detach()


def trained(text, converted, chunks, num_steps=3, dtype=torch.float32):
    """Train in a layout; return losses beside the reference's, and the largest errors of gradients and weights."""
    losses_1, gradients, weights = reference(converted, chunks, num_steps, dtype)
    run = composed(text, seeded(Wide).to(dtype))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.2)
    tokens, targets = (mine(run, tensor) for tensor in batch())
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(float("inf"))
            optimizer.step()
    found = {name: (full(p.grad), full(p)) for name, p in run.named_parameters()}
    run.close()
    errors = [
        max(float((pair[index] - wanted[name]).abs().max() / wanted[name].abs().max()) for name, pair in found.items())
        for index, wanted in enumerate((gradients, weights))
    ]
    return losses, losses_1, *errors


def counted(text):
    """Return the collectives of one step."""
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.2)
    tokens, targets = (mine(run, tensor) for tensor in batch())
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    run.close()
    return collectives.summary()


def saved(path, text, load, num_steps):
    """Train to a checkpoint and on, or from it; return full weights."""
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    weights = go_on(run, optimizer, batch(), path, load=load, num_steps=num_steps)
    run.close()
    return weights


def plan(text):
    """Return the plan and the classes of modules."""
    run = composed(text, seeded(Wide))
    classes = {fqn: type(module).__name__ for fqn, module in run.parts[0].module.named_modules()}
    found = run.describe().splitlines()[1:]
    run.close()
    return found, classes


def assert_bits_of_one_device(world_size, layouts, table, converted):
    """Train in layouts that shard no single layer; results equal those of one device with the same micro-batches."""
    cases = ((layout + table, converted, world_size) for layout in layouts)
    for ranks in in_one_world(trained, world_size, *cases):
        for losses, losses_1, gradients, weights in ranks:
            assert (gradients, weights) == (0.0, 0.0)
            assert losses == pytest.approx(losses_1, rel=1e-6)
            assert losses[-1] < losses[0]


def assert_resumes_and_reshards(path, table):
    """Assert that a resumed run is the same, and that weights load in any layout, without the plugin too."""
    text = "[sharding.fsdp2]\n" + table
    cases = (*((path, text, *case) for case in ((False, 4), (True, 2), (True, 0))), (path, TP, True, 0))
    whole, again, two, resharded = (ranks[0] for ranks in in_one_world(saved, 2, *cases))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(two[name], resharded[name]) for name in two)


def assert_converted(table, *, transform, cls):
    """Assert that a plan has one conversion, of the blocks' layers, which are of a class then."""
    found, classes = run_ranks(plan, 1, table)[0]
    assert found == [f"CONVERT      {transform:<24} layers.0.up, layers.0.down, layers.1.up, ... 4 in all"]
    assert [fqn for fqn, name in classes.items() if name == cls] == [
        f"layers.{index}.{name}" for index in range(2) for name in ("up", "down")
    ]
