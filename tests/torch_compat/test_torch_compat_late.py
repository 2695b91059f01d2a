"""Private names of torch about graphs of parameters that FSDP2 has freed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer3d import torch_compat
from composer3d.testing import run_ranks
from composer3d.torch_compat.fsdp_units.late_gathers import (
    FreedParameter,
    MarkedOutputs,
    freed_parameters,
    shard_versions,
)
from composer3d.torch_compat.fsdp_units.unit_gradients import fill_gradients
from composer3d.torch_compat.later_backwards import look_at, unwatched_grad


def freed():
    """Return the names that are found of graphs past a unit and of the unit's own, before and after it is freed."""
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    units = torch_compat.watch_units(model)
    assert isinstance(model._get_fsdp_state(), MarkedOutputs)
    output = model(torch.ones(2, 4))
    group = next(torch_compat.fsdp_groups(model))[0]
    own = torch.ones(4, 4, requires_grad=True)
    graphs = {
        "leaf": model.weight.sum(),
        "saved": (own * model.weight.detach()).sum(),
        "none": (own * 2).sum(),
        "unit": output.sum(),
    }
    starts = {name: [loss.grad_fn] for name, loss in graphs.items()}
    before = [freed_parameters([group], nodes) for nodes in starts.values()]
    output.sum().backward(retain_graph=True)
    assert fill_gradients(group) and group.fsdp_params[0]._unsharded_param.grad.count_nonzero() == 0
    after = {name: units.freed(nodes) for name, nodes in starts.items()}
    assert all(isinstance(each, FreedParameter) and each.is_current for found in after.values() for each in found)
    versions = shard_versions(group)
    with torch.no_grad():
        model.weight.add_(1)
    assert shard_versions(group) != versions
    assert [each.is_current for each in units.freed(starts["leaf"])] == [False]
    return before, {name: [each.fqn for each in found] for name, found in after.items()}


def test_graphs_past_units_show_what_is_freed():
    for before, after in run_ranks(freed, 2):
        assert before == [[]] * 4
        assert after == {"leaf": ["weight"], "saved": ["weight"], "none": [], "unit": []}


def test_who_watches_sees_every_backward_but_those_inside_of_one():
    seen = []
    watching = torch_compat.LaterBackwards(seen.append)
    x = torch.ones(2, requires_grad=True)
    y = x.sum()
    look_at(y)
    watching.open()
    try:
        look_at(y)
        with torch_compat.function_mode(lambda function, args, kwargs: function(*args, **kwargs)):
            y.backward(retain_graph=True)
        x.register_hook(lambda gradient: look_at(y))
        torch.autograd.grad([y], [x])
        assert unwatched_grad(x.sum(), x)[0].tolist() == [1.0, 1.0]
    finally:
        watching.shut()
    assert seen == [[y.grad_fn]] * 3
