from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from composer3d.testing import Collective, count_collectives, fake_world, run_ranks

NUM_STEPS, NUM_MICROBATCHES, NUM_LAYERS = 3, 4, 4


class Tower(nn.Module):
    """Four blocks and a head: with FSDP2 on each block and the root, five groups of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def sharded(mesh, reshard_after_forward):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Tower()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def train(zero):
    """Three steps of four microbatches under FSDP2 at a ZeRO level; return what was counted."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = sharded(mesh, reshard_after_forward=zero == 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with count_collectives(mesh) as collectives:
        for _ in range(NUM_STEPS):
            for index in range(NUM_MICROBATCHES):
                last = index == NUM_MICROBATCHES - 1
                if zero < 3:
                    model.set_requires_gradient_sync(last)
                if zero == 1:
                    model.set_reshard_after_backward(last)
                model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return collectives.summary()


@pytest.mark.parametrize(("zero", "num_gathers", "num_scatters"), [(3, 120, 60), (2, 60, 15), (1, 15, 15)])
def test_fsdp2_on_real_ranks(zero, num_gathers, num_scatters):
    # Sharded by rows: 6 x 6 and 6 in each block, and a head of 3 rows that is padded to 4.
    num_bytes = 4 * (NUM_LAYERS * (36 + 6) + 4 * 6 + 4)
    num_groups = NUM_LAYERS + 1
    for summary in run_ranks(train, 2, zero):
        assert summary == {
            ("all_gather", "dp_shard"): (num_gathers, num_gathers // num_groups * num_bytes),
            ("reduce_scatter", "dp_shard"): (num_scatters, num_scatters // num_groups * num_bytes),
        }


def test_backward_is_counted_and_nothing_outside_the_block():
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = sharded(mesh, reshard_after_forward=True)
        loss = model(torch.ones(2, 6)).sum()
        with count_collectives(mesh) as collectives:
            loss.backward()
        dist.all_reduce(torch.ones(1))
    # The root stays gathered after forward, as FSDP2 does by default.
    assert collectives.count("all_gather", "dp_shard") == NUM_LAYERS + 1
    assert collectives.count("reduce_scatter", "dp_shard") == NUM_LAYERS + 1
    assert collectives.count() == 2 * (NUM_LAYERS + 1)


def test_collectives_inside_dtensor_operators_are_seen():
    from torch.distributed.tensor import Shard, distribute_tensor

    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        logits = distribute_tensor(torch.ones(4, 8), mesh["tp"], [Shard(1)], src_data_rank=None)
        with count_collectives(mesh) as collectives:
            logits.softmax(dim=1)
            logits.full_tensor()
    assert collectives.count("all_gather", "tp") == 2
    assert collectives.count() == 2


def test_loss_parallel_issues_its_three_all_reduces():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        logits = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        with count_collectives(mesh) as collectives, loss_parallel():
            nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    assert collectives.summary() == {("all_reduce", "tp"): (3, 3 * 4 * 4)}


def every_operator():
    """Issue each operator once over two ranks, and return the rows."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    # torch 2.13 renamed it and deprecates the old name.
    reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    two, four = torch.ones(2), torch.ones(4)
    with count_collectives() as collectives:
        dist.all_reduce(two)
        dist.all_gather([torch.empty(2), torch.empty(2)], two)
        dist.reduce_scatter(torch.empty(2), [two, two])
        dist.all_to_all_single(torch.empty(4), four)
        dist.broadcast(two, src=0)
        dist.reduce(two, dst=0)
        dist.gather(two, [torch.empty(2), torch.empty(2)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(2), [two, two] if rank == 0 else None, src=0)
        if rank == 0:
            dist.send(two, dst=other)
        else:
            dist.recv(torch.empty(2), src=other)
        dist.barrier()
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, two, other), dist.P2POp(dist.irecv, torch.empty(2), other)]
        ):
            work.wait()
        functional.all_reduce(two, "sum", dist.group.WORLD) + 1
        functional.all_reduce_coalesced([two, four], "sum", dist.group.WORLD)[1] + 1
        reduce_scatter(four, "sum", 0, dist.group.WORLD) + 1
        leaf = torch.ones(4, requires_grad=True)
        functional.all_to_all_single_autograd(leaf, [2, 2], [2, 2], dist.group.WORLD).sum().backward()
    return [(row.op, row.axis, row.ranks, row.bytes, row.dtype) for row in collectives.rows]


def test_every_operator_is_normalised():
    float32 = torch.float32
    for rank, rows in enumerate(run_ranks(every_operator, 2)):
        assert [(op, size) for op, _, _, size, _ in rows] == [
            ("all_reduce", 8),
            ("all_gather", 16),
            ("reduce_scatter", 16),
            ("all_to_all", 16),
            ("broadcast", 8),
            ("reduce", 8),
            ("gather", 8),
            ("scatter", 8),
            ("recv" if rank else "send", 8),
            ("barrier", 0),
            ("send", 8),
            ("recv", 8),
            ("all_reduce", 8),
            ("all_reduce", 24),
            ("reduce_scatter", 16),
            ("all_to_all", 16),
            ("all_to_all", 16),
        ]
        assert {row[1:3] + row[4:] for row in rows if row[0] != "barrier"} == {("world", (0, 1), float32)}
        assert [row[4] for row in rows if row[0] == "barrier"] == [None]


def test_a_functional_all_gather_counts_its_result_and_its_backward():
    gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    with fake_world(4), count_collectives() as collectives:
        leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        gather(leaf, 0, dist.group.WORLD).square().sum().backward()
    assert collectives.summary() == {("all_gather", "world"): (1, 16), ("reduce_scatter", "world"): (1, 16)}
    assert [row.dtype for row in collectives.rows] == [torch.bfloat16, torch.bfloat16]


def test_a_collective_on_the_result_of_one_is_one():
    with fake_world(2), count_collectives() as collectives:
        once = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        functional.all_reduce(once, "sum", dist.group.WORLD) + 1
    assert collectives.summary() == {("all_reduce", "world"): (2, 16)}


def test_a_coalesced_collective_is_one_row():
    with fake_world(2), count_collectives() as collectives:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
    assert [(row.op, row.bytes) for row in collectives.rows] == [("all_reduce", 20)]


@pytest.mark.parametrize("rank", [0, 5, 11])
def test_groups_have_the_names_of_their_axes(rank):
    with fake_world(12, rank):
        mesh = init_device_mesh("cpu", (2, 3, 1, 2), mesh_dim_names=("pp", "dp_shard", "cp", "tp"))
        groups = {axis: mesh[axis].get_group() for axis in ("pp", "dp_shard", "tp")}
        joined = mesh["dp_shard", "tp"]._flatten("dp_shard_tp").get_group()
        odd = dist.new_group([0, 5, 11])
        with count_collectives(mesh) as collectives:
            for group in (*groups.values(), joined, None, odd):
                dist.all_reduce(torch.ones(1), group=group)
    assert [row.axis for row in collectives.rows] == ["pp", "dp_shard", "tp", "dp_shard_tp", "world", "ranks(0,5,11)"]
    assert [len(row.ranks) for row in collectives.rows] == [2, 3, 2, 6, 12, 3]
    assert all(rank in row.ranks for row in collectives.rows)


def test_count_chooses_by_op_and_axis():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        with count_collectives(mesh) as collectives:
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
            dist.all_reduce(torch.ones(1), group=mesh["dp_shard"].get_group())
            dist.broadcast(torch.ones(1), group=mesh["tp"].get_group(), group_src=0)
    assert collectives.count() == 3
    assert (collectives.count("all_reduce"), collectives.count(axis="tp")) == (2, 2)
    assert (collectives.count("all_reduce", "tp"), collectives.count("all_to_all")) == (1, 0)


def test_a_row_is_a_value():
    row = Collective(op="send", axis="pp", ranks=(0, 1), bytes=8, dtype=torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.op = "recv"
    assert {row, dataclasses.replace(row)} == {row}
