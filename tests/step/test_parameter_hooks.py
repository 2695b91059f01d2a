"""Gradient hooks that a loop registers on composed parameters: called as on one device, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "one rank": (1, "[sharding.fsdp2]\n"),
    "zero 1": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\nzero = 1\n"),
    "ddp": (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    "ddp, bucketed": (2, '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'),
    "tp": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"),
    "fsdp2, tp": (4, "[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
}
TOLERANCE = 1e-12


def net():
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))


def hooked(model, seen):
    """Register hooks: not linear, that draw, that keep what they see, several of one parameter, after accumulation."""
    model[0].weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    model[3].weight.register_hook(lambda grad: grad + 0.01 * torch.randn_like(grad))
    model[3].weight.register_hook(lambda grad: grad * (grad.abs() > 0.02))
    model[5].weight.register_hook(seen.append)

    def halved(parameter):
        parameter.grad.mul_(0.5)

    return model[5].bias.register_post_accumulate_grad_hook(halved)


def trained(model, optimizer, backward, x, y):
    """Train for three steps of two backwards each; return what a hook has kept."""
    seen = []
    removed = hooked(model, seen)
    torch.manual_seed(2)
    for step in range(3):
        for half in (0, 1):
            backward(mse_loss(model(x[half]), y[half]) / 2)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            removed.remove()
    return seen


def differences(path):
    """Return the largest relative differences of parameters, and of kept gradients, to one device's."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = net(), torch.randn(2, 4, 6), torch.randn(2, 4, 1)
    reference = copy.deepcopy(model)
    expected = trained(reference, torch.optim.SGD(reference.parameters(), lr=0.1), torch.Tensor.backward, x, y)
    run = composer3d.compose(model, path)
    rank, size = run.context.data_parallel_rank, 4 // run.context.data_parallel_degree
    mine = slice(rank * size, (rank + 1) * size)
    seen = trained(run.model, run.optimizer(torch.optim.SGD, lr=0.1), run.backward, x[:, mine], y[:, mine])
    whole = dict(reference.named_parameters())
    pairs = [(run.full_tensor(fqn, value), whole[fqn]) for fqn, value in run.named_parameters()]
    pairs += [(run.full_tensor("5.weight", value), other) for value, other in zip(seen, expected, strict=True)]
    found = [float(((one - other).abs().max() / other.abs().max()).detach()) for one, other in pairs]
    run.close()
    return max(found)


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_hooks_see_the_gradient_of_each_backward_of_the_global_batch_and_change_it(layout):
    world_size, text = LAYOUTS[layout]
    assert max(run_ranks(differences, world_size, write_manifest(text))) <= TOLERANCE


def refused(path):
    """Return what is said of a backward that does not complete gradients, and of a parameter that is gathered."""
    run = composer3d.compose(net(), path)
    run.optimizer(torch.optim.SGD, lr=0.1)
    weight, found = run.model[0].weight, []
    for when, last in ((0, False), (1, True)):
        handle = weight.register_hook(lambda grad: grad) if when == 0 else None
        loss = run.model(torch.ones(2, 6)).mean()
        handle = handle or run.model[0].weight.register_hook(lambda grad: grad)
        with pytest.raises(composer3d.StepError) as caught:
            run.backward(loss, last=last)
        found.append(str(caught.value))
        handle.remove()
    run.close()
    return found


def test_hooks_are_refused_where_they_would_not_see_a_backwards_whole_gradient():
    (found,) = run_ranks(refused, 1, write_manifest("[sharding.fsdp2]\n"))
    assert found == [
        '"0.weight" has a gradient hook, which one device calls with the gradient of each backward, and gradients of '
        "this step are complete after its last one; instead of the hook write what it does to parameter.grad before "
        "optimizer.step()",
        'a hook was registered on "0.weight" while a forward had gathered it, and would be called with this rank\'s '
        "gradient; register hooks before the forward",
    ]


def hooked_alone(hook, rank):
    """Return what is said of a hook that one rank alone registers after the first step."""
    run = composer3d.compose(net(), write_manifest("[sharding.fsdp2]\n"))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    try:
        for step in range(4):
            if step == 1 and run.context.rank == rank:
                run.model[0].weight.register_hook(hook)
            run.backward(run.model(torch.ones(2, 6)).mean())
            optimizer.step()
            optimizer.zero_grad()
    except composer3d.StepError as error:
        return str(error)
    finally:
        run.close()


def test_a_hook_that_changes_a_gradient_on_one_rank_alone_is_named_in_the_next_step():
    assert (
        run_ranks(hooked_alone, 2, lambda grad: grad * 0, 1)
        == [
            "the loop of rank 1 (dp_shard 1) decided something else than that of rank 0 before step 2: the gradient of "
            '"0.weight" by its hooks in the last step: changed, not unchanged; all ranks must decide alike'
        ]
        * 2
    )


def test_a_hook_that_looks_at_a_gradient_on_one_rank_alone_is_left_alone():
    assert run_ranks(hooked_alone, 2, lambda grad: None, 0) == [None, None]


def asking(path, how):
    """Return the differences of weights to one device's after steps in whose backwards a hook asks for parameters."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(net(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))),
        *torch.randn(2, 4, 6),
    )
    y = y[:, :1]
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path, loss_fn=mse_loss)
    own, asked = dict(run.named_parameters()), []

    def ask(*unused):
        found = dict(run.named_parameters())
        asked.append(found.keys() == own.keys() and all(found[fqn] is own[fqn] for fqn in own))

    inner = run.model[1]
    if how == "module":
        inner[2].register_full_backward_hook(ask)
    elif how == "activation":
        inner[0].register_forward_hook(lambda module, inputs, output: (output.register_hook(ask), None)[1])
    else:
        inner[2].weight.register_post_accumulate_grad_hook(ask)
    optimizer, plain = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    size = 4 // run.context.data_parallel_degree
    mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
    for step in range(2):
        with run.step(step):
            run.forward_backward(x[mine], target=y[mine])
            optimizer.step()
            optimizer.zero_grad()
        mse_loss(reference(x), y).backward()
        plain.step()
        plain.zero_grad()
    whole = dict(reference.named_parameters())
    pairs = [(run.full_tensor(fqn, value).detach(), whole[fqn].detach()) for fqn, value in run.named_parameters()]
    run.close()
    return asked, max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("how", ["module", "activation", "gradient"])
def test_parameters_that_a_hook_asks_for_in_a_backward_are_the_shards(how):
    path = write_manifest('[mesh]\ndp_shard = 2\n[sharding.fsdp2]\nunits = ["1"]\n')
    for asked, difference in run_ranks(asking, 2, path, how):
        assert asked and all(asked)
        assert difference < TOLERANCE
