"""Private names of torch about FSDP2's units that a rank uses in part."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.testing import fake_world, run_ranks
from composer3d.torch_compat.layouts import unify_group


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.used(x)


def reduced():
    """Return which parameters a unit knows as used, the gradient of the other, and what was sent."""
    model = fully_shard(Half(), mesh=init_device_mesh("cpu", (2,)))
    units = torch_compat.watch_units(model)
    assert isinstance(units, torch_compat.Units)
    model(torch.ones(2, 4)).sum().backward()
    group = next(torch_compat.fsdp_groups(model))[0]
    assert torch_compat.gradient_version(group.fsdp_params[0]) is None
    group.fsdp_params[0].unsharded_accumulated_grad = torch.ones(4, 4)
    group.fsdp_params[0]._unsharded_param.grad = torch.ones(4, 4)
    unify_group(group)
    summed = torch_compat.gradient_of(group.fsdp_params[0]).unique().tolist()
    group.fsdp_params[0]._unsharded_param.grad = torch.ones(4, 4)
    before = torch_compat.gradient_version(group.fsdp_params[0])
    group.fsdp_params[0]._unsharded_param.grad.add_(1)
    assert before != torch_compat.gradient_version(group.fsdp_params[0]) is not None
    assert units.num_unused() == 1
    own = group.fsdp_params[0].sharded_param
    own.grad = own.detach().redistribute(placements=[Replicate()])
    assert torch_compat.shard_gradients(group) is group and own.grad.placements == own.placements
    return [used for _, used in units.trained()], model.idle.weight.grad.full_tensor().sum().item(), units.sent, summed


def test_units_reduce_zeros_for_what_a_rank_has_not_used():
    assert run_ranks(reduced, 2) == [([True, False], 0.0, [0, 1], [2.0])] * 2


def test_entries_stand_before_methods_that_read_parameters_while_a_unit_is_sharded():
    class Coder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.inner = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Linear(2, 2)

        def encode(self, x):
            return x @ self.weight

        def name(self):
            return "coder"

    with fake_world(2):
        unit = fully_shard(Coder())
        entered = []

        def enter(call, args, kwargs):
            entered.append(args)
            return "gathered"

        entries = torch_compat.entries_of(unit, unit._get_fsdp_state()._fsdp_param_group, enter)
        assert isinstance(entries, torch_compat.Entries)
        assert unit.encode(1) == unit.inner(2) == "gathered" and unit.name() == "coder"
        entries.open()
        assert entered == [(1,), (2,)] and "encode" not in vars(unit)
        entries.shut()
        assert unit.encode(3) == "gathered"


def test_units_that_a_graph_has_saved_are_released():
    with fake_world(2):
        model = fully_shard(Half())
        (group,) = torch_compat.watch_units(model).groups
        group.is_held = True
        torch_compat.release_units(model)
        assert not group.is_held
        torch_compat.release_units(nn.Linear(2, 2))  # of no data parallelism: nothing


def test_operators_on_meta_are_those_that_are_given_tensors_there():
    assert torch_compat.works_on_meta((1, torch.ones(2, device="meta")))
    assert not torch_compat.works_on_meta((1, torch.ones(2)))
    with FakeTensorMode():
        assert torch_compat.works_on_meta((torch.ones(2, device="meta"),))
        assert not torch_compat.works_on_meta((torch.ones(2),))


def test_places_of_parameters_know_what_stands_there():
    with fake_world(2):
        model = fully_shard(Half())
        group = next(torch_compat.fsdp_groups(model))[0]
        places, others = torch_compat.Places(group, {id(model.used): "used", id(model.idle): "idle"}), []
        places.verify(others.append)
        model.unshard()
        gathered, model.used._parameters["weight"] = model.used.weight, group.fsdp_params[0].sharded_param
        model.idle._parameters["weight"] = torch.ones(4, 4)
        places.verify(others.append)
        assert others == ["idle.weight"]
        assert model.used.weight is gathered


class Seen(torch_compat.ModuleFunctions, TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_modes_around_a_forward_see_the_model_and_not_what_gathers_it():
    with fake_world(2):
        model = fully_shard(Half())
        torch_compat.watch_units(model)
        model(torch.ones(2, 4)).sum().backward()
        with Seen() as seen:
            model(torch.ones(2, 4))
    assert "linear" in seen.names and not {"untyped_storage", "_version", "data_ptr", "split"} & set(seen.names)
