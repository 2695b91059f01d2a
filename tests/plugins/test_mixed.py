from __future__ import annotations

import pytest
import torch
from support.models import composed, mine, padded, seeded, sum_loss

from composer3d import ManifestError
from composer3d.testing import count_collectives, full, run_ranks

LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, "[sharding.fsdp2]", id="fsdp2"),
    pytest.param(2, "[sharding.ddp]", id="ddp"),
    pytest.param(2, '[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed"),
    pytest.param(2, '[scheduling.activation_checkpoint]\n[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed-ac"),
]


def bfloat16_reference(tokens, targets, chunks):
    """One device that cuts the batch as the run does: bfloat16 compute, float32 weights and sums of gradients."""
    total = {}
    count = (targets != -100).sum()
    model = seeded()
    for part in range(chunks):
        narrow = seeded().bfloat16()
        size = tokens.shape[0] // chunks
        cut = slice(part * size, (part + 1) * size)
        loss, _ = sum_loss(narrow(tokens[cut]), targets[cut])
        (loss * (chunks / count)).backward()
        for name, p in narrow.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float() / chunks
    assert dict(model.named_parameters()).keys() == total.keys()
    return total


def step(text):
    tokens, targets = padded()
    run = composed(text + "\n[precision.mixed]")
    reference = bfloat16_reference(tokens, targets, run.context.data_parallel_degree)
    seen = []
    run.parts[0].module.layers[0].up.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        dtypes = {(row.op, row.axis, str(row.dtype)) for row in collectives.rows}
        run.clip_grad_norm_(float("inf"))
        error = max(
            float((full(p.grad) - reference[name]).abs().max() / reference[name].abs().max())
            for name, p in run.named_parameters()
        )
        kinds = {(p.dtype, p.grad.dtype) for _, p in run.named_parameters()}
    run.close()
    return error, kinds, set(seen), dtypes


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
def test_means_the_same_in_every_layout(world_size, text):
    for error, kinds, seen, _ in run_ranks(step, world_size, text):
        # The same roundings in the same places: what is left is the order of float32 sums.
        assert error < 2e-6
        assert kinds == {(torch.float32, torch.float32)}
        assert seen == {(torch.bfloat16, torch.bfloat16)}


def test_collectives_carry_the_dtypes():
    *_, dtypes = run_ranks(step, 2, "[sharding.fsdp2]")[0]
    assert ("all_gather", "dp_shard", "torch.bfloat16") in dtypes
    assert ("reduce_scatter", "dp_shard", "torch.float32") in dtypes


def trains(text):
    run = composed(text + '\n[precision.mixed]\noutput_dtype = "float32"')
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(60):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p.detach()) for name, p in run.named_parameters()}
    run.close()
    return losses, weights


def test_the_loss_falls_and_ranks_agree():
    (losses, first), (other, second) = run_ranks(trains, 2, "[sharding.fsdp2]")
    assert losses[-1] < 0.5 * losses[0]
    assert losses == other
    assert all(torch.equal(first[name], second[name]) for name in first)


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


def test_refuses_other_dtypes():
    message = run_ranks(refusal, 1, '[precision.mixed]\nparam_dtype = "bf16"')[0]
    assert message == (
        ':3:1: [precision.mixed] param_dtype = "bf16" is not one of "bfloat16", "float32"; did you mean "bfloat16"?'
    )


def test_buckets_refuse_a_narrow_reduction():
    text = '[sharding.ddp]\nreducer = "bucketed"\n[precision.mixed]\nreduce_dtype = "bfloat16"'
    assert run_ranks(refusal, 1, text)[0] == (
        ":2:11: [sharding.ddp] the buckets reduce gradients in the dtype of the weights, float32, and another "
        'reduce_dtype is asked for; write reducer = "unit"'
    )
