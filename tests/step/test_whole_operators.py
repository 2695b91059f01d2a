"""What a loop does to parameters and gradients itself, in any layout: what it does on one device."""

from __future__ import annotations

import copy
import logging
import re
from logging.handlers import BufferingHandler

import pytest
import torch
from support.family_models import GPT2
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": (2, "[sharding.fsdp2]\n"),
    "ddp": (2, "[sharding.ddp]\n"),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
    "fsdp2, tp": (4, "[mesh]\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
}
TOLERANCE = 1e-12


def net():
    """Return a model whose last shards are uneven or empty, and whose norm tensor parallelism replicates."""
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))


def drawn(model):
    torch.manual_seed(3)
    nn.init.xavier_uniform_(model[0].weight)
    model[3].reset_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            parameter.data.mul_(torch.empty_like(parameter).bernoulli_(0.9))
            parameter.add_(nn.functional.dropout(parameter, 0.5), alpha=0.1)
        nn.init.trunc_normal_(model[5].weight, generator=torch.Generator().manual_seed(5))
    for number in (0, 3):  # draws until all ranks' shards are within
        nn.init.trunc_normal_(model[number].weight, std=0.2, a=-0.4, b=0.4)
    nn.init.normal_(model[0].bias)


def plain_written(model):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(whole)
            parameter.mul_(1 + whole.abs())
            parameter.sub_(torch.ones(()))
            parameter.add_(whole[..., :1])


def joined(model):
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())


def sub_loaded(model):
    weight = torch.arange(100.0).reshape(10, 10) / 100
    model(torch.ones(2, 6))  # gathers
    model[3].load_state_dict({"weight": weight, "bias": weight[3]})


def renormed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.renorm(parameter, 2, 1, 0.5))


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clamped(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def own_norm(model):
    with torch.no_grad():
        norm = torch.sqrt(sum(parameter.grad.pow(2).sum() for parameter in model.parameters()))
        stacked = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.div_(norm)
            parameter.grad.add_(parameter.grad * (0.5 / stacked))


def centralised(model):
    for parameter in model.parameters():
        parameter.grad.sub_(parameter.grad.mean(0, keepdim=True) / 2)
        parameter.grad.mul_(parameter.grad.abs() >= parameter.grad.abs().median())


BEFORE = (drawn, plain_written, sub_loaded, renormed)
AFTER = (clipped, clamped, own_norm, centralised)


def penalised(model):
    absolute = sum(parameter.abs().sum() for parameter in model.parameters())
    return 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters()) + 0.02 * absolute


def trained(model, optimizer, backward, body, x, y):
    """Train for two steps with what a loop does before or after the first backward, or adds to its loss."""
    if body in (*BEFORE, joined):
        body(model)
    for _ in range(2):
        loss = mse_loss(model(x), y)
        backward(loss + penalised(model) if body is penalised else loss)
        if body in AFTER:
            body(model)
        optimizer.step()
        optimizer.zero_grad()


def difference(run, expected):
    """Return the largest difference of any parameter to one device's, over the largest value of that."""
    whole = dict(expected.named_parameters())
    return max(
        float(((run.full_tensor(fqn, value) - whole[fqn]).abs().max() / whole[fqn].abs().max()).detach())
        for fqn, value in run.named_parameters()
    )


def differences(path):
    """Return differences to one device by name of the body."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(4, 6), torch.randn(4, 1)
    reference, initial = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    run = composer3d.compose(model, path)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    composed = run.optimizer(torch.optim.SGD, lr=0.1)
    rank, size = run.context.data_parallel_rank, 4 // run.context.data_parallel_degree
    mine = slice(rank * size, (rank + 1) * size)
    found, warnings = {}, BufferingHandler(1000)
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(warnings)
    # torch flattens no uneven shards over two axes.
    for body in (*BEFORE, *AFTER, penalised, *((joined,) if run.context.world_size == 2 else ())):
        reference.load_state_dict(initial)
        run.model.load_state_dict(initial)
        trained(reference, optimizer, torch.Tensor.backward, body, x, y)
        trained(run.model, composed, run.backward, body, x[mine], y[mine])
        found[body.__name__] = difference(run, reference)
    run.close()
    found["warnings that nobody could act on"] = len(warnings.buffer)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_loop_does_to_parameters_and_gradients_is_what_it_does_on_one_device(layout):
    world_size, text = LAYOUTS[layout]
    for found in run_ranks(differences, world_size, write_manifest(text)):
        assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}


def written_into_fused(path):
    """Draw and copy into the fused projection of query, key and value, whose rows tensor parallelism reorders."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    tokens = torch.arange(24).reshape(4, 6) % 11
    model = GPT2()
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path, example=((tokens,), {}))
    for each in (reference, run.model):
        torch.manual_seed(4)
        for parameter in each.parameters():
            nn.init.normal_(parameter)
    drawn = difference(run, reference)
    with torch.no_grad():
        for parameter, value in zip(run.model.parameters(), reference.parameters(), strict=True):
            parameter.data.copy_(-value)
            value.neg_()
    found = drawn, difference(run, reference)
    run.close()
    return found


def test_rows_that_are_stored_in_another_order_are_drawn_and_written_in_the_models():
    assert run_ranks(written_into_fused, 2, write_manifest(LAYOUTS["tp"][1])) == [(0.0, 0.0)] * 2


def with_seeds_of_their_own(path):
    """Draw into replicated parameters from generators that differ between ranks; return numbers of this rank."""
    run = composer3d.compose(nn.Linear(4, 4), path)
    torch.manual_seed(run.context.rank)
    nn.init.normal_(run.model.weight)
    found = run.full_tensor("weight", run.model.weight).flatten().tolist()
    after = float(torch.rand(()))
    run.close()
    return found, after


def test_replicas_draw_the_same_from_generators_that_differ_and_keep_their_own():
    (one, after_one), (other, after_other) = run_ranks(with_seeds_of_their_own, 2, write_manifest(LAYOUTS["ddp"][1]))
    assert one == other and after_one != after_other


def refused(path):
    """Return what is said where a rank's data would be taken for the whole, or a view of shards lost."""
    run = composer3d.compose(nn.Linear(4, 5), path)
    x, found = torch.ones(3, 4), []
    weight = run.model.weight
    for wrong in (
        lambda: x @ weight.T,
        lambda: run.model(x).mean() * weight.sum(),
        lambda: weight.detach().mul_(torch.ones(7, 4)),
        lambda: torch.cat([weight, nn.Parameter(torch.ones(1, 4))]),
    ):
        with pytest.raises(composer3d.StepError) as caught:
            wrong()
        found.append(str(caught.value))
    run.close()
    return found


def test_what_cannot_be_is_refused_with_its_line():
    first, second = run_ranks(refused, 2, write_manifest(LAYOUTS["fsdp2"][1]))
    assert first == second
    advice = (
        "write whole = p.full_tensor() on all ranks, compute with that, and p.copy_(whole) under torch.no_grad() for "
        "what is to be kept"
    )
    assert [re.sub(r"test_whole_operators.py:\d+: ", "", text) for text in first] == [
        "aten::mm is given a sharded tensor, which stands for the whole one, and a plain tensor, of which it is not "
        f"known whether it is a rank's data; {advice}",
        "a loss of this rank's data is multiplied with a number of the composed model's parameters, whose gradient is "
        "then this rank's alone; compute it in the model's forward",
        "aten::mul_.Tensor is given a tensor of shape [7, 4] and a sharded one, whose whole shape is [5, 4]; a plain "
        "tensor beside it is taken for the whole, on all ranks",
        "aten::cat is given a sharded tensor, which stands for the whole one, and a plain tensor, of which it is not "
        "known whether it is a rank's data; write it under torch.no_grad(), where it is computed on whole tensors, on "
        "all ranks",
    ]


def extremes(path):
    """Return extremes of a parameter with fewer rows than there are ranks, and its values."""
    run = composer3d.compose(nn.Linear(4, 2), path)
    weight = run.model.weight.detach()
    found = [weight.max(), weight.min(), weight.norm(float("inf")), weight.abs().amax(), weight.norm()]
    values = [float(value) for value in found], weight.full_tensor().tolist()
    run.close()
    return values


def test_extremes_where_a_ranks_shard_is_empty():
    for found, weight in run_ranks(extremes, 3, write_manifest(LAYOUTS["fsdp2"][1])):
        whole = torch.tensor(weight)
        expected = [whole.max(), whole.min(), whole.abs().max(), whole.abs().max(), whole.norm()]
        assert found == pytest.approx([float(value) for value in expected], rel=1e-6)
