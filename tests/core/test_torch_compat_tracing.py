"""The private names of torch that runs without values rest on."""

from __future__ import annotations

import torch
from torch import nn

from composer3d import torch_compat
from composer3d.testing import fake_world


def test_fake_tensors_have_no_values_and_answer_when_asked():
    with torch_compat.fake_tensors() as mode:
        tensor = torch.zeros(3)
        assert tensor.fake_mode is mode and torch_compat.active_fake_mode() is mode
        assert (float(tensor.sum()), int(torch.zeros(1, dtype=torch.int64)), bool(tensor.isnan().any())) == (
            1.0,
            0,
            False,
        )
        assert torch.equal(tensor, tensor + 1)
        with torch_compat.with_values():
            assert torch.arange(3).tolist() == [0, 1, 2]
    assert torch_compat.active_fake_mode() is None


def test_a_fake_tensors_device_is_a_question_that_modes_see():
    asked = []

    def handle(operator, types, args, kwargs):
        asked.append((operator, args[0]))
        return operator(*args, **kwargs)

    with torch_compat.fake_tensors():
        tensor = torch.zeros(3, requires_grad=True)
        with torch_compat.dispatch_mode(handle, compiles=False):
            (tensor * 2).sum().backward()
    questions = [of for operator, of in asked if operator is torch_compat.device_question()]
    assert questions and all(of.fake_device == torch.device("cpu") for of in questions)


def test_views_and_operators_in_place_are_told_from_others():
    aten = torch.ops.aten
    assert [torch_compat.is_view(op) for op in (aten.view.default, aten._unsafe_view.default, aten.mul.Tensor)] == [
        True,
        True,
        False,
    ]
    assert [torch_compat.is_in_place(op) for op in (aten.add_.Tensor, aten.add.Tensor)] == [True, False]


def test_storages_that_change_by_hand_are_told():
    seen = []
    with torch_compat.watch_storages(lambda storage: seen.append(storage.nbytes()), lambda paused: None):
        torch.zeros(4).untyped_storage().resize_(0)
    torch.zeros(4).untyped_storage().resize_(0)
    assert seen == [0]


def test_plain_tensors_of_wrappers_and_the_buffers_of_sharded_units():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_world(2):
        module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        (plain,) = torch_compat.plain_tensors(module.weight)
        assert tuple(plain.shape) == (2, 4)
        module(torch.ones(1, 4))
        assert {tensor.untyped_storage().nbytes() for tensor in torch_compat.fsdp_buffers(module)} == {16, 64}


def test_a_lone_pipeline_replaces_methods_that_torch_has():
    from torch.distributed.pipelining import PipelineStage, schedules

    names = PipelineStage._recv_meta, PipelineStage._send_meta, schedules._batch_p2p
    with torch_compat.lone_pipeline(lambda on: None, lambda *said: None, lambda *asked: None):
        assert PipelineStage._recv_meta is not names[0] and schedules._batch_p2p is not names[2]
    assert (PipelineStage._recv_meta, PipelineStage._send_meta, schedules._batch_p2p) == names
