"""The private names of torch that pipelines and spans of messages rest on."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composer3d import torch_compat
from composer3d.testing import fake_world, run_ranks


def test_pipeline_schedules_are_found_by_name():
    from torch.distributed.pipelining import Schedule1F1B, ScheduleZBVZeroBubble

    assert torch_compat.pipeline_schedule("1F1B") is Schedule1F1B
    assert torch_compat.pipeline_schedule("ZBVZeroBubble") is ScheduleZBVZeroBubble


def test_a_custom_schedule_takes_actions():
    from torch.distributed.pipelining import PipelineStage

    from composer3d.testing import fake_world

    with fake_world(2):
        stage = PipelineStage(torch.nn.Linear(2, 2), 0, 2, torch.device("cpu"))
        orders = [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "I", 0), (1, "W", 0)]]
        schedule = torch_compat.custom_pipeline_schedule([stage], orders, n_microbatches=1)
    assert [str(action) for action in schedule.pipeline_order[1]] == ["1F0", "1I0", "1W0"]
    assert "0SEND_F0" in [str(action) for action in schedule.pipeline_order_with_comms[0]]


def test_a_stage_greets_no_stage_of_its_own_rank():
    from torch.distributed.pipelining import PipelineStage

    with fake_world(2, rank=1):
        stage = PipelineStage(torch.nn.Linear(2, 2), 1, 4, torch.device("cpu"))
        stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
        before = stage._get_init_p2p_neighbors_ops()
        after = torch_compat.without_own_messages(stage)._get_init_p2p_neighbors_ops()
    assert sorted(each.group_peer for each in before) == [0, 0, 1, 1]
    assert [each.group_peer for each in after] == [0, 0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient * weight, gradient * x


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (2, 13), reason="torch 2.13 keeps the graph itself"
)
def test_a_graph_is_held_between_the_halves_of_its_backward():
    from torch.distributed.pipelining import PipelineStage

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x):
            return Doubled.apply(x + 0.0, self.weight) * 1.0

    kept = {}
    with fake_world(2, rank=1):
        stage = PipelineStage(Scaled(), 1, 2, torch.device("cpu"))
        stage.has_backward, stage.chunks = True, 1
        x = torch.ones(2, requires_grad=True)
        loss = stage.submod(x).sum()
        stage.fwd_cache[0] = ((loss,), [x])
        with torch_compat.held_graph(stage, 0, kept):
            stage.backward_one_chunk(0, loss=loss, full_backward=False)
        del loss
        stage.backward_weight_one_chunk(0)
    assert stage.submod.weight.grad.tolist() == [1.0, 1.0] and x.grad is not None


def test_pipeline_orders_are_those_of_the_schedule():
    first, second = torch_compat.pipeline_orders("LoopedBFS", 2, 2, 2)
    assert first == [(stage, "F", m) for stage in (0, 2) for m in (0, 1)] + [
        (stage, "B", m) for stage in (2, 0) for m in (1, 0)
    ]
    assert {stage for stage, _, _ in second} == {1, 3}
    overlapped = torch_compat.pipeline_orders("DualPipeV", 2, 4, 2)
    for rank, order in enumerate(overlapped):
        assert sorted(a for a in order if a[1] == "F") == [(s, "F", m) for s in (rank, 3 - rank) for m in range(4)]
        assert sum(kind in "BW" for _, kind, _ in order) == 2 * 4


def test_a_described_stage_sends_what_json_carries():
    import json

    from torch.distributed.pipelining import _utils

    sent, expected = [], []

    def send(value, rank):
        sent.append((json.loads(json.dumps(value)), rank))

    with fake_world(4, rank=1):
        stage = torch_compat.described_stage()(
            torch.nn.Linear(2, 2), 1, 4, torch.device("cpu"), send=send, receive=lambda rank: sent[-1][0]
        )
        tensors = (torch.ones(3, 2, requires_grad=True), torch.ones(4, dtype=torch.int64))
        forms = tuple(_utils._TensorMeta.from_tensor(tensor) for tensor in tensors)
        for meta, other in ((_utils._StageForwardMeta(forms), 2), (_utils._StageBackwardMeta((forms[0], None)), 0)):
            stage._send_meta(meta, other)
            expected.append(stage._recv_meta(other) == meta)
        stage.receive_description = lambda rank: ["forward_metas", [[[1], [1], "int32", False]]]
        assert stage._recv_meta(0).forward_metas[0].dtype is torch.int32
    assert expected == [True, True] and [rank for _, rank in sent] == [2, 0]


def operators():
    """Reduce a DTensor in an operator, watched; return what was opened, and what torch is after it."""
    from contextlib import nullcontext

    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, opened, plain = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [], functional.all_reduce

    def span(name, group, **attributes):
        opened.append((name, torch_compat.group_name(group) == torch_compat.group_name(mesh.get_group()), attributes))
        return nullcontext()

    end = torch_compat.watch_operator_collectives(span)
    total = DTensor.from_local(torch.ones(6), mesh, [Partial()]).redistribute(mesh, [Replicate()]).to_local() + 0
    end()
    return opened, total.tolist(), functional.all_reduce is plain


def test_watch_operator_collectives():
    for opened, total, is_plain in run_ranks(operators, 2):
        assert opened == [("all_reduce", True, {"bytes": 24}), ("wait", True, {"op": "all_reduce"})]
        assert total == [2.0] * 6 and is_plain


def compiled_operators():
    from contextlib import nullcontext

    from torch.distributed import _functional_collectives as functional

    operators = [torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default]
    plain, hashes, opened = [op._op for op in operators], [hash(op) for op in operators], []

    def span(name, group, **attributes):
        opened.append((name, group.size(), attributes))
        return nullcontext()

    def double(x):
        return functional.all_reduce(x, "sum", dist.group.WORLD) * 2

    end = torch_compat.watch_operator_collectives(span)
    same = hashes == [hash(op) for op in operators]
    result = torch.compile(double, backend="aot_eager")(torch.ones(5)).tolist()
    end()
    return result, opened, same and [op._op for op in operators] == plain


def test_watching_collectives_in_compiled_code():
    """Nothing is opened while it is traced, and an operator's hash stays, by which the compiler finds it."""
    for result, opened, is_plain in run_ranks(compiled_operators, 2):
        assert result == [4.0] * 5 and is_plain
        assert opened == [("all_reduce", 2, {"bytes": 20}), ("wait", 2, {"op": "all_reduce"})]


def test_watching_the_exchange_of_the_dim_that_is_cut():
    """On devices that are no CPU it is an operator of its own; nothing is computed here."""
    from contextlib import nullcontext

    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, placement_types

    plain, opened = placement_types.shard_dim_alltoall, []

    def span(name, group, **attributes):
        opened.append((name, group.size(), attributes))
        return nullcontext()

    with fake_world(2):
        mesh = DeviceMesh("cuda", [0, 1], mesh_dim_names=("tp",))
        end = torch_compat.watch_operator_collectives(span)
        with FakeTensorMode():
            cut = DTensor.from_local(torch.ones(6, 2, device="cuda"), mesh, [Shard(1)], run_check=False)
            assert cut.redistribute(mesh, [Shard(0)]).to_local().shape == (3, 4)
        end()
    assert opened == [("all_to_all", 2, {"bytes": 48})] and placement_types.shard_dim_alltoall is plain


def test_watching_messages():
    from torch.distributed.pipelining import schedules

    before = schedules._batch_p2p, schedules._wait_batch_p2p
    with torch_compat.watching_messages(lambda name, **attributes: None):
        assert schedules._batch_p2p is not before[0] and schedules._wait_batch_p2p is not before[1]
        # Nothing to wait for is no message.
        assert schedules._batch_p2p([]) == [] and schedules._wait_batch_p2p([]) is None
    assert (schedules._batch_p2p, schedules._wait_batch_p2p) == before


def wait_for_a_message(how):
    from torch.distributed.pipelining import schedules

    group, device, tensor = dist.group.WORLD, torch.device("cpu"), torch.zeros(2)
    if dist.get_rank() == 0:
        torch_compat.set_group_timeout(None, timedelta(milliseconds=200))
        with pytest.raises(RuntimeError, match="(?i)timed out waiting 200ms"):
            if how == "alone":
                torch_compat.wait_for_message(dist.irecv(tensor, 1), group, device)
            elif how == "object":
                with torch_compat.bounded_messages(group, device):
                    dist.recv_object_list([None], 1, use_batch=True)
            else:
                with torch_compat.bounded_messages(group, device):
                    (work,) = schedules._batch_p2p([dist.P2POp(dist.irecv, tensor, 1)])
                    assert not work.is_completed()
                    schedules._wait_batch_p2p([work])
    # A message that was given up closes its connection: what is left to meet at is the store.
    store = torch_compat.default_store()
    store.set(f"done/{dist.get_rank()}", "")
    store.wait(["done/0", "done/1"])


@pytest.mark.parametrize("how", ["alone", "object", "batch"])
def test_a_message_is_waited_for_no_longer_than_a_collective(how):
    from torch.distributed import distributed_c10d
    from torch.distributed.pipelining import schedules

    before = schedules._batch_p2p, distributed_c10d.batch_isend_irecv
    run_ranks(wait_for_a_message, 2, how)
    with fake_world(2), torch_compat.bounded_messages(dist.group.WORLD, torch.device("cpu")):
        assert (schedules._batch_p2p, distributed_c10d.batch_isend_irecv) == before


def test_collectives_that_python_code_calls_for_are_watched_until_the_end():
    from contextlib import nullcontext

    seen = []

    def span(op, group, **attributes):
        seen.append((op, group.size(), attributes["bytes"]))
        return nullcontext()

    with fake_world(2):
        end = torch_compat.watch_group_collectives(span, lambda op: op != "broadcast")
        try:
            dist.all_reduce(torch.ones(3))
            dist.broadcast(torch.ones(3), src=0)
            dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))
            dist.all_to_all_single(torch.ones(4), torch.ones(4))
            dist.barrier()
        finally:
            end()
        dist.all_reduce(torch.ones(3))
    assert seen == [("all_reduce", 2, 12), ("all_gather", 2, 16), ("all_to_all", 2, 16), ("barrier", 2, 0)]
