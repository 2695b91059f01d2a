"""Reductions over replicas that a function takes the place of, in units and in buckets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composer3d import torch_compat
from composer3d.testing import run_ranks


def doubled(buffer, gradients, group):
    """Put twice the mean in place, and look at what is handed over."""
    assert sum(gradient.numel() for _, gradient in gradients) == 6
    assert all(isinstance(getattr(*held), torch.Tensor) for held, _ in gradients)
    dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=group)
    buffer *= 2


def gradients_of(kind):
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if kind == "units":
        torch_compat.replicate_units(module, mesh=mesh)
        assert torch_compat.replica_groups(module) == [mesh.get_group()]
        held = torch_compat.unit_parameters(module)
        torch_compat.replace_all_reduce(module, doubled)
    else:
        held = list(torch_compat.bucket_parameters(module).values())
        torch_compat.replicate_buckets(module, device_mesh=mesh)
        torch_compat.replace_bucket_reduction(module, doubled, mesh.get_group())
    assert held == [(module, "weight"), (module, "bias")]
    module(torch.full((1, 2), float(dist.get_rank() + 1))).sum().backward()
    return [torch_compat.held_tensor(parameter.grad).clone() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", ["units", "buckets"])
def test_a_function_takes_the_place_of_an_all_reduce(kind):
    """The mean of ranks with ones and twos in their rows is 1.5, and that of their bias 1."""
    for weight, bias in run_ranks(gradients_of, 2, kind):
        assert torch.equal(weight, torch.full((2, 2), 3.0)) and torch.equal(bias, torch.full((2,), 2.0))


def in_turn():
    """Return gradients of a unit of three backwards, looked at after the last, and in how many memories they are."""
    from torch.distributed.device_mesh import init_device_mesh

    module, found = nn.Linear(2, 2, bias=False), []
    torch_compat.replicate_units(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    torch_compat.replace_all_reduce(module, lambda buffer, gradients, group: buffer.fill_(len(found)))
    ((_, _, scatter),) = torch_compat.fsdp_groups(module)
    (parameter,) = module.parameters()
    for _ in range(3):
        module(torch.full((1, 2), 5.0)).sum().backward()
        found.append(torch_compat.held_tensor(parameter.grad))
        module.zero_grad()
        if len(found) == 1:
            scatter.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))  # by a backward that fails then
    return [gradient.unique().tolist() for gradient in found], len({each.data_ptr() for each in found})


def test_gradients_of_units_are_in_memory_of_their_own_whatever_failed_before():
    """What FSDP2 would copy from one buffer to another is in one, which no later backward is given."""
    assert run_ranks(in_turn, 2) == [([[0.0], [1.0], [2.0]], 3)] * 2
