"""Assignments to `.data` of DTensors, and writes into gathered parameters of FSDP2's units."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import zeros

from composer3d import torch_compat
from composer3d.testing import run_ranks
from composer3d.torch_compat.fsdp_units.gathered_writes import versions_of


def assigned():
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = fully_shard(nn.Linear(2, 3, bias=False), mesh=mesh)
    weight = model.weight
    shard = torch_compat.unit_shards(model)[id(weight)]
    assert isinstance(shard, torch_compat.UnitShard) and shard.parameter is weight and not shard.is_gathered
    old, ignored = weight.data, weight.detach() * 0
    weight.data = ignored
    assert bool((weight.to_local() == old.to_local()).all())  # torch changes nothing

    def assign(tensor, value):
        torch_compat.take_local(tensor, value, shard)
        return True

    torch_compat.assign_data(assign)
    value = zeros(3, 2, device_mesh=mesh, placements=weight.placements)
    weight.data = value
    torch_compat.leave_data()
    value.add_(2)  # shares memory
    outputs = model(torch.ones(1, 2)).tolist()
    model.reshard()
    units = torch_compat.watch_units(model)
    found = []
    units.written = lambda fqn, parameter, whole: found.append((fqn, tuple(whole.shape)))
    sharded = model.weight
    assert torch_compat.shards_of_gathered(model) == {}
    model.unshard()
    assert sharded is not model.weight and torch_compat.shards_of_gathered(model) == {id(model.weight): sharded}
    with torch.no_grad():
        model.weight.mul_(3)
    group = next(torch_compat.fsdp_groups(model))[0]
    assert versions_of(group).keys() == set(group.fsdp_params)
    model.reshard()
    torch_compat.write_back(group, {}, units.written)  # nothing is known of what was gathered
    return outputs, found, model.weight.full_tensor().tolist(), bool((old.to_local() == 0).all() and old.numel())


def test_a_parameter_has_what_it_is_assigned_and_what_was_written_while_it_was_gathered():
    for outputs, found, weight, is_lost in run_ranks(assigned, 2):
        assert outputs == [[4.0] * 3] and weight == [[6.0, 6.0]] * 3 and not is_lost
        assert found == [("weight", (3, 2))]
