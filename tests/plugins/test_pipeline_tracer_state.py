"""Traced pipelines: checkpoints, tensor parallelism, and what they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.models import VOCAB, Block, composed, mine, padded, seeded
from support.pipeline_models import assert_equal_to_one_device, pipelined_step, token_sum
from support.traced_models import DIM, Shared
from torch import nn

from composer3d import ManifestError, StepError
from composer3d.testing import run_ranks

TRACER = '[mesh]\npp = 2\n[scheduling.pipeline]\nsplit = "tracer"\n'


# ---- state -----------------------------------------------------------------------------------------------------------


def trained(folder, text, *, resume):
    run = composed(text + "\n[train]\nmicrobatch = 3\n", partial(seeded, Shared), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = padded()
    if resume:
        run.load(f"{folder}/checkpoint")
    for number in range(2 if resume else 0, 3):
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            run.save(f"{folder}/checkpoint")
    loss = float(run.evaluate(mine(run, tokens), target=mine(run, targets)).loss)
    run.close()
    return loss


LAYOUTS = {
    "one": (1, ""),
    "fsdp2": (2, "[sharding.fsdp2]\n"),
    "tracer": (2, TRACER),
    "tracer-fsdp2": (4, TRACER + 'schedule = "ZBVZeroBubble"\n[sharding.fsdp2]\n'),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [("tracer", "one"), ("fsdp2", "tracer"), ("tracer-fsdp2", "tracer"), ("tracer", "tracer-fsdp2")],
)
def test_checkpoints_of_one_layout_resume_in_another(tmp_path, before, after):
    (size, text), (other_size, other) = LAYOUTS[before], LAYOUTS[after]
    losses = run_ranks(partial(trained, resume=False), size, tmp_path, text)
    again = run_ranks(partial(trained, resume=True), other_size, tmp_path, other)
    assert len(set(losses)) == len(set(again)) == 1
    assert again[0] == pytest.approx(losses[0], rel=2e-6)


class Wide(nn.Module):
    """Shared blocks of even dims, with a skip over all of them."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(Feed() for _ in range(2))
        self.out = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        first = x = self.tok(tokens)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.out(x + first) + 0.0


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def test_tensor_parallelism_finds_the_modules():
    text = TRACER.replace("pp = 2", "pp = 2\ntp = 2") + (
        '[sharding.tensor_parallel]\nplan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise" }\n'
    )
    assert_equal_to_one_device(run_ranks(pipelined_step, 4, text, Wide))


# ---- refusals --------------------------------------------------------------------------------------------------------


class Refused(nn.Module):
    """A model that does between its blocks what `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Odd(how) for _ in range(4))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        a, b, c, d = self.layers
        x = self.tok(tokens)
        if self.how == "drawn":
            noise = F.dropout(x, 0.5)
            return self.out(d(c(b(a(noise)))) + noise)
        if self.how == "changed":
            y = b(a(x))
            return self.out(d(c(y)) + x)
        if self.how == "beside":
            return self.out(d(c(b(a(x)))) + a.beside)
        if self.how == "kept":
            return self.out(d(c(b(a(x)))) + a.kept[-1])
        if self.how == "written":
            return self.out(a(d(c(b(a(x))))))
        if self.how == "unused":
            b(a(x))
            return self.out(d(c(torch.ones(2, 8, DIM))))
        return self.out(b(a(x)))


class Odd(Block):
    def __init__(self, how):
        super().__init__(DIM)
        self.how = how
        if how == "written":
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.how == "changed":
            x += 1.0
        if self.how == "written":
            self.calls += 1
        y = super().forward(x)
        self.beside, self.kept = y * 2, [y]
        return y


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "drawn",
            "stages 0 and 1 use the same random numbers, which the forward draws between modules, and each would draw "
            "its own; draw them in a module (torch.nn.Dropout)",
        ),
        (
            "changed",
            '"layers.0" changes in place what it is given, and another stage than its own uses that; let it change a '
            "copy, or split elsewhere",
        ),
        (
            "beside",
            'the forward uses something that "layers.0" computed and did not return, and only what modules return can '
            "travel between stages",
        ),
        (
            "kept",
            'the forward takes what "layers.0" computed from where it or a hook left it, a list or an attribute, and '
            "another stage, which does not make the call, has nothing there; take it from what the call returns, or "
            "split elsewhere",
        ),
        (
            "written",
            'the buffer "layers.0.calls" is written by calls on stages 0 and 1, each of which would have its own; '
            "split elsewhere",
        ),
        ("unused", 'nothing that is computed before "layers.2" is used there or later'),
    ],
)
def test_refusals(how, message):
    for text in run_ranks(refusal, 2, how, ""):
        assert text == f":4:13: [scheduling.pipeline] {message}"


class Reading(Odd):
    """A block that reads what another one has left."""

    def __init__(self):
        super().__init__("")

    def forward(self, x):
        return super().forward(x + self.read() if hasattr(self, "read") else x)


class Reads(nn.Module):
    """A chain of blocks, one of which reads what the block before it has left."""

    def __init__(self, reader):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Reading() for _ in range(4))
        before = self.layers[reader - 1]
        self.layers[reader].read = lambda: before.kept[-1]

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_what_a_block_has_left_is_read_in_its_own_stage_alone():
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, TRACER, Reads, {"reader": 1}))
    for text in run_ranks(partial(refusal, factory=Reads, reader=2), 2, "", 'split = "auto"'):
        assert (
            '; and where values are traced, the forward takes what "layers.1" computed from where it or a hook' in text
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            'schedule = "LoopedBFS"',
            "pp = 2 with 2 stages a rank makes 4 stages, and the model calls blocks 2 times (layers.0 to layers.1); "
            "every stage needs one",
        ),
        (
            'split = { tracer = ["layers.0@1"] }',
            'split names "layers.0@1", which is no block; blocks are layers.0 to layers.1',
        ),
    ],
)
def test_cuts_that_are_not_there(more, message):
    for text in run_ranks(refusal, 2, "few", more):
        assert text.partition("[scheduling.pipeline] ")[2] == message


def refusal(how, more, factory=Refused, **options):
    text = TRACER.replace('split = "tracer"\n', "") if "split" in more else TRACER
    with pytest.raises(ManifestError) as caught:
        composed(text + more + "\n", seeded(factory, **(options or {"how": how})))
    return str(caught.value).partition("run.toml")[2]


class Moody(Shared):
    """Another order in evaluation."""

    def forward(self, tokens):
        if self.training:
            return super().forward(tokens)
        x = self.tok(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return {"logits": self.out(self.norm(x))}


def evaluated():
    run = composed(TRACER, seeded(Moody), loss_fn=token_sum)
    tokens, targets = padded()
    with pytest.raises(StepError) as caught:
        run.evaluate(tokens, target=targets)
    run.close()
    return str(caught.value)


def test_a_forward_that_changes_its_mind_is_refused():
    first, _ = run_ranks(evaluated, 2)  # the second rank only loses the first
    assert "in another place than when the model was split; a pipeline needs the same calls in every forward" in first
