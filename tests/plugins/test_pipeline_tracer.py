"""Pipelines of models whose blocks are called in any way: `split = "tracer"`."""

from __future__ import annotations

from functools import partial

import pytest
from support.models import composed, padded, seeded
from support.pipeline_models import assert_equal_to_one_device, beside_one_device, pipelined_step, token_sum
from support.traced_models import Disorder, Shared, Twins, Unet, Writing

from composer3d.testing import count_collectives, run_ranks


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
    for worst, *_ in run_ranks(partial(beside_one_device, num_steps=3), size, manifest(schedule) + options, Shared):
        assert worst < 1e-12


def parameters_of(text, factory):
    run = composed(text, seeded(factory))
    found = [sorted({name.rpartition(".")[0] for name, _ in part.module.named_parameters()}) for part in run.parts]
    run.close()
    return found


def linears(*blocks):
    return [f"{block}.{linear}" for block in blocks for linear in ("down", "up")]


@pytest.mark.parametrize(
    ("factory", "split", "first", "second"),
    [
        (Shared, '"tracer"', ["layers.0", "layers.1", "layers.2", "tok"], None),
        (
            Shared,
            '{ tracer = ["layers.2@1"] }',
            ["layers.0", "layers.1", "layers.2", "tok"],
            ["layers.2", "norm", "out"],
        ),
        (Shared, '{ tracer = ["layers.1"] }', ["layers.0", "tok"], None),
        (Disorder, '{ tracer = ["layers.3"] }', ["layers.1", "layers.2", "tok"], ["layers.0", "layers.3", "out"]),
    ],
)
def test_stages_hold_what_their_calls_need(factory, split, first, second):
    found, more = run_ranks(parameters_of, 2, manifest(split=split), factory)
    every = ["layers.0", "layers.1", "layers.2", "norm", "out"]
    for (names,), expected in ((found, first), (more, second or every)):
        assert names == sorted(
            name for block in expected for name in (linears(block) if block.startswith("layers") else [block])
        )


def crossing():
    """Count what a second step sends: values over the boundary, and what ranks reduce."""
    run = composed(manifest(factory=Unet) + "[train]\nmicrobatch = 2\n", seeded(Unet))
    tokens, targets = padded()
    for number in range(2):
        with count_collectives(run.mesh) as collectives, run.step(number):
            run.forward_backward(tokens, target=targets)
    run.close()
    return {key: count for key, (count, _) in collectives.summary().items()}


def test_collectives():
    # Over the middle of the U travel what goes into the first block up, and two skips.
    first, second = run_ranks(crossing, 2)
    assert {first["send", "pp"], first["recv", "pp"], second["send", "pp"], second["recv", "pp"]} == {3 * 6}
    # No parameter has copies: what is counted is the core's.
    assert first["all_reduce", "pp"] == second["all_reduce", "pp"] == 2


class Dropping(Shared):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.dropout.p = 0.5


def drawn(seed):
    run = composed(manifest() + f"[train]\nmicrobatch = 3\nseed = {seed}\n", seeded(Dropping), loss_fn=token_sum)
    tokens, targets = padded()
    seen = []
    for part in run.parts:
        for name, module in part.module.named_modules():
            if name.endswith("dropout"):
                module.register_forward_hook(lambda _, args, output: seen.append((output == 0).flatten().tolist()))
    losses = []
    for number in range(2):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
    run.close()
    return losses, seen[3:]  # the first forward only learns shapes


def test_dropout_is_the_same_again_and_differs_between_calls():
    once, again, other = (run_ranks(drawn, 2, seed) for seed in (1, 1, 2))
    assert once == again
    assert once[0][0] == once[1][0] != other[0][0]
    masks = [tuple(mask) for _, seen in once for mask in seen]
    assert len(masks) == 2 * 6 * 4  # steps, calls of blocks, micro-batches
    assert len(set(masks)) == len(masks)
