"""Operators on DTensors that functions of ours compute."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

from composer3d import torch_compat
from composer3d.testing import run_ranks


def handled():
    mesh, calls, owned = init_device_mesh("cpu", (2,)), [], [True]
    negate = torch.ops.aten.neg_.default

    def handler(operator, args, kwargs):
        calls.append(operator.name())
        with torch_compat.torch_handled(operator):
            operator(*args, **kwargs)
        args[0].to_local().add_(2.0)
        return args[0]

    def uncovered(operator, args, kwargs):
        calls.append(operator.name())
        return torch.tensor(7.0)

    settled = {negate: lambda args, kwargs: args[0].shape[0] == 2}
    torch_compat.handle_operators(
        {negate: handler}, uncovered=uncovered, mixed=lambda operator: None, owns=lambda args: bool(owned),
        settled=settled,
    )  # fmt: skip
    for _ in range(2):
        assert zeros(2, 3, device_mesh=mesh, placements=[Shard(0)]).add_(1.0).neg_().to_local().tolist() == [[-1.0] * 3]
    tensor = zeros(4, 3, requires_grad=False, device_mesh=mesh, placements=[Shard(0)])
    tensor.neg_()
    found = calls, tensor.to_local().tolist(), float(torch.renorm(tensor, 2, 1, 0.5)), isinstance(tensor, DTensor)
    for leave in (owned.clear, torch_compat.leave_operators):
        leave()
        assert tensor.neg_().to_local().tolist()[0][0] in (2.0, -2.0)
        with pytest.raises(NotImplementedError, match="renorm"):
            torch.renorm(tensor, 2, 1, 0.5)
    return found


def num_fake_modes():
    """Return how many modes of fake tensors two threads make for operators of several shapes, before and with ours."""
    made, make = [], FakeTensorMode.__init__

    def counted(mode, *args, **kwargs):
        made.append(mode)
        make(mode, *args, **kwargs)

    FakeTensorMode.__init__ = counted
    mesh = init_device_mesh("cpu", (2,))
    torch_compat.leave_operators()  # an earlier composition of this process, whose children ranks are, may have begun

    def propagate(rows):
        for size in range(rows, rows + 3):
            tensor = zeros(size, 3, device_mesh=mesh, placements=[Shard(0)])
            assert tensor.mul_(2.0).lerp_(tensor, 0.5).shape == (size, 3)

    def of(rows):
        made.clear()
        propagate(rows)
        thread = threading.Thread(target=propagate, args=(rows + 3,))
        thread.start()
        thread.join()
        return len(made)

    nothing = dict.fromkeys(("uncovered", "mixed"), lambda *args: None)
    torchs = of(2)
    torch_compat.handle_operators({}, owns=lambda args: False, settled={}, **nothing)
    ours = of(8)
    torch_compat.leave_operators()
    return torchs > 10, ours, of(14) == torchs


def test_a_thread_keeps_the_fake_mode_that_torch_makes_for_each_operator_and_shape():
    assert run_ranks(num_fake_modes, 2) == [(True, 2, True)] * 2


def test_an_operator_goes_to_its_handler_and_one_without_a_rule_to_the_other():
    expected = (["aten::neg_", "aten::renorm"], [[2.0] * 3] * 2, 7.0, True)
    assert run_ranks(handled, 2) == [expected] * 2


def test_operators_that_draw_and_that_are_mixed_are_found_in_this_torch():
    names = {operator.name() for operator in torch_compat.drawing_operators()}
    assert {"aten::normal_", "aten::uniform_", "aten::bernoulli_.float", "aten::randn_like"} <= names
    mixable = torch_compat.mixable_operators()
    assert "aten::add_.Tensor" in {operator.name() for operator in mixable.elementwise}
    writing = {operator.name() for operator in torch_compat.writing_operators()}
    assert {"aten::zero_", "aten::index_put_", "aten::masked_fill_.Scalar"} <= writing and "aten::t_" not in writing
    assert "aten::select.int" in {operator.name() for operator in torch_compat.viewing_operators()}
    kept, tensor = torch_compat.weak_tensor_dictionary(), torch.ones(2)
    kept[tensor] = "root"
    assert tensor in kept and torch.ones(2) not in kept
    assert "aten::_foreach_norm.Scalar" in {operator.name() for operator in mixable.lists}
