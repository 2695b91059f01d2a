"""Pipelines of models whose blocks are called in any way: `split = "tracer"`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.models import VOCAB, Block, Net, composed, full, mine, padded, seeded
from support.pipelined import assert_equal_to_one_device, pipelined_step, token_sum
from support.traced import DIM, Disorder, Shared, Twins, Unet, Writing
from torch import nn

from composer3d import ManifestError, StepError
from composer3d.testing import run_ranks


def manifest(schedule="1F1B", pp=2, factory=None, split='"tracer"', more=""):
    if factory is Unet:  # blocks in two lists
        more += '\n[model]\nblocks = "[du]*.[0-9]"\n'
    return f'[mesh]\npp = {pp}\n[scheduling.pipeline]\nschedule = "{schedule}"\nsplit = {split}\n{more}'


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("factory", [Shared, Unet, Disorder, Writing, Twins])
def test_gradients_equal_one_device(factory, schedule):
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, manifest(schedule, factory=factory), factory))


@pytest.mark.parametrize("factory", [partial(Shared, num_layers=4), Unet])
def test_four_ranks(factory):
    blocks = factory if factory is Unet else None
    text = manifest("Interleaved1F1B" if blocks is None else "1F1B", pp=4, factory=blocks)
    step = partial(pipelined_step, microbatch=2, batch=partial(padded, 8))
    assert_equal_to_one_device(run_ranks(step, 4, text, factory))


def several(schedule, options):
    """Train on both for some steps, evaluating between; return the greatest distances, and names."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    model = seeded(Shared)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = composed(manifest(schedule) + options + "[train]\nmicrobatch = 2\n", seeded(Shared), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    worst = 0.0
    for number in range(3):
        total, count = token_sum(model(tokens), targets)
        (total / count).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            norm = run.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, float((norm - expected).abs() / expected))
        total, count = token_sum(model(tokens), targets)
        loss = run.evaluate(mine(run, tokens), target=mine(run, targets)).loss
        worst = max(worst, float((loss - total.detach() / count).abs()))
    weights = dict(model.named_parameters(remove_duplicate=False))
    names = set()
    for part in run.parts:
        for name, parameter in part.module.named_parameters():
            worst = max(worst, float((full(parameter) - weights[name].detach()).abs().max()))
            names.add(name)
    run.close()
    return worst, sorted(names)


@pytest.mark.parametrize(
    ("size", "schedule", "options"),
    [
        (2, "1F1B", ""),
        (4, "1F1B", "[sharding.fsdp2]\n"),
        (4, "ZBVZeroBubble", "[sharding.fsdp2]\n"),
        (4, "GPipe", "[sharding.fsdp2]\nzero = 2\n[scheduling.activation_checkpoint]\n"),
        (4, "1F1B", "[sharding.ddp]\n"),
    ],
)
def test_shared_blocks_stay_equal_to_one_devices(size, schedule, options):
    options = options.replace("[sharding.ddp]", "[sharding.ddp]\n[mesh]\ndp_replicate = 2") if False else options
    for worst, _ in run_ranks(several, size, schedule, options):
        assert worst < 1e-12


def parameters_of(text, factory):
    run = composed(text, seeded(factory))
    found = [sorted({name.rpartition(".")[0] for name, _ in part.module.named_parameters()}) for part in run.parts]
    values = [[int(p.data_ptr()) for p in part.module.parameters()] for part in run.parts]
    run.close()
    return found, values


def linears(*blocks):
    return [f"{block}.{linear}" for block in blocks for linear in ("down", "up")]


@pytest.mark.parametrize(
    ("factory", "split", "first", "second"),
    [
        (Shared, '"tracer"', ["layers.0", "layers.1", "layers.2", "tok"], None),
        (Shared, '{ tracer = ["layers.2@1"] }', ["layers.0", "layers.1", "layers.2", "tok"], ["layers.2", "norm", "out"]),
        (Shared, '{ tracer = ["layers.1"] }', ["layers.0", "tok"], None),
        (Disorder, '{ tracer = ["layers.3"] }', ["layers.1", "layers.2", "tok"], ["layers.0", "layers.3", "out"]),
    ],
)
def test_stages_hold_what_their_calls_need(factory, split, first, second):
    (found, _), (more, _) = run_ranks(parameters_of, 2, manifest(split=split), factory)
    every = ["layers.0", "layers.1", "layers.2", "norm", "out"]
    for (names,), expected in ((found, first), (more, second or every)):
        assert names == sorted(
            name for block in expected for name in (linears(block) if block.startswith("layers") else [block])
        )
