"""What is done to a model's own code so that it gets shares right: nothing, sizes in attributes, or following."""

from __future__ import annotations

import torch
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from support.family_models import VOCAB, class_loss
from support.models import largest, write_manifest
from support.shared_parts import SHARED_PARTS
from support.tensor_parallel import AUTO, on_one_rank
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
DIM, HEADS = 16, 4
SP = "sequence_parallel = true"


class Attention(nn.Module):
    """Reads its number of heads, and keeps what it is given if it is given a list."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x, kept):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        kept.append(k)
        out = nn.functional.scaled_dot_product_attention(q, torch.cat(kept, 2), torch.cat([v] * len(kept), 2))
        return x + self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, reads=False):
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.reads = reads

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, [])
        return self.out(x / self.layers[0].num_heads if self.reads else x)


def batch(size, length):
    tokens = torch.randint(0, VOCAB, (size, length + 1), generator=torch.Generator().manual_seed(size))
    return tokens[:, :-1], tokens[:, 1:]


def steps(reads, settings):
    """Return the rows about code, and the largest error of a gradient in steps of several sizes."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    alone, model = Model(reads), Model(reads)
    model.load_state_dict(alone.state_dict())
    run = composer3d.compose(model, write_manifest(f"[mesh]\ntp = 2\n{AUTO}{settings}\n"), loss_fn=class_loss)
    rows = {row.name.removeprefix("tensor_parallel."): row.fqns for row in run.plan}
    errors = []
    for number, (size, length) in enumerate([(1, 2), (4, 8), (3, 4), (4, 8)]):
        inputs, targets = batch(size, length)
        alone.zero_grad()
        loss, count = class_loss(alone(inputs), targets)
        (loss / count).backward()
        expected = {name: p.grad for name, p in alone.named_parameters()}
        least = 1e-3 * max(float(g.abs().max()) for g in expected.values())
        # One sample a micro-batch; the rest is accumulated.
        with run.step(number):
            run.forward_backward(inputs, target=targets)
            errors += [
                float((full(p.grad) - expected[name]).abs().max()) / max(float(expected[name].abs().max()), least)
                for name, p in run.named_parameters()
            ]
            for _, p in run.named_parameters():
                p.grad = None
    heads = [layer.num_heads for layer in run.model.layers]
    run.close()
    return {label: rows.get(label, ()) for label in ("sizes", "propagated")}, largest(errors), heads


BLOCKS = ("layers.0", "layers.1")


def test_an_attribute_holds_this_ranks_number_of_heads_for_batches_of_any_size():
    for settings in ("", SP):
        for rows, error, heads in run_ranks(steps, 2, False, settings):
            assert rows == {"sizes": BLOCKS, "propagated": ()}
            assert heads == [HEADS // 2] * 2
            assert error < TIGHT


def test_an_attribute_that_the_model_reads_elsewhere_is_left_and_the_code_propagated():
    for rows, error, heads in run_ranks(steps, 2, True, ""):
        assert rows == {"sizes": (), "propagated": BLOCKS}
        assert heads == [HEADS] * 2
        assert error < TIGHT


def dry_runs(num_layers):
    """Return how often two stacks of blocks were run on meta to derive their plan, and what is propagated then."""
    num_runs, answers = [0], BlockDryRun._answers

    def counted(self, code):
        num_runs[0] += 1
        return answers(self, code)

    BlockDryRun._answers = counted
    try:
        model = SHARED_PARTS["Towers"](num_layers=num_layers)
        run = composer3d.compose(model, write_manifest(f"[mesh]\ntp = 2\n{AUTO}\n"), loss_fn=class_loss)
        propagated = next(row.fqns for row in run.plan if row.name == "tensor_parallel.propagated")
        run.close()
    finally:
        BlockDryRun._answers = answers
    return num_runs[0], propagated


def test_the_blocks_of_a_stack_are_not_looked_at_one_after_another():
    (few, _), (many, propagated) = (on_one_rank(dry_runs, 2, num_layers) for num_layers in (2, 5))
    assert few == many < 30
    assert len(propagated) == 10
