"""Options of process groups, and reduce-scatters that are replaced."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composer3d import torch_compat
from composer3d.testing import fake_world, run_ranks
from composer3d.torch_compat.collectives.own_groups import own_groups
from composer3d.torch_compat.collectives.processes import shared_lone_groups

NCCL = {
    "high_priority_stream": True,
    "blocking": False,
    "min_ctas": 2,
    "max_ctas": 8,
    "cga_cluster_size": 4,
    "cta_policy": "zero",
    "nvls_ctas": 6,
    "collnet": True,
    "split_share": True,
    "net_name": "Socket",
    "traffic_class": 5,
}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_options_of_nccl_are_its_own_fields():
    """No GPU is needed: the object is what torch makes a process group with."""
    assert torch_compat.nccl_fields() == frozenset(NCCL)
    options = torch_compat.nccl_options(NCCL, timeout=timedelta(seconds=7))
    config = options.config
    found = {name: getattr(config, name) for name in NCCL if hasattr(config, name)}
    assert found == {n: v for n, v in NCCL.items() if n not in ("high_priority_stream", "collnet")} | {
        "cta_policy": int(dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO),
        "blocking": 0,
        "split_share": 1,
    }
    assert config.collnet_enable == 1 and options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=7)
    plain, unset = dist.ProcessGroupNCCL.Options(), torch_compat.nccl_options(dict.fromkeys(NCCL), timeout=None)
    assert unset.config.min_ctas == plain.config.min_ctas and unset._timeout == plain._timeout
    with pytest.raises(AttributeError, match="this build's NCCL has no option no_such"):
        torch_compat.nccl_options({"no_such": 1}, timeout=None)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch is built with NCCL")
def test_a_build_without_nccl_has_none_of_its_fields():
    assert torch_compat.nccl_fields() is None


def overridden():
    own = torch_compat.group_override(backend=None, options=None, own_group=True)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"), backend_override={"a": own})
    group = mesh.get_group("a")
    return (
        own,
        torch_compat.group_override(backend=None, options=None, own_group=False),
        torch_compat.group_override(backend="gloo", options="options", own_group=False),
        group is not dist.group.WORLD,
        torch_compat.backend_of(group, "cpu"),
        torch_compat.group_among(("sum", (mesh, 0))) is group,
        torch_compat.group_among(("sum", 1)),
    )


def test_a_dim_of_all_ranks_can_have_a_group_of_its_own():
    assert run_ranks(overridden, 2)[0] == ("gloo", None, ("gloo", "options"), True, "gloo", True, None)
    with fake_world(4):
        assert torch_compat.group_override(backend="gloo", options=None, own_group=False) == "fake"
        assert torch_compat.group_override(backend=None, options=None, own_group=False) is None


def replaced():
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.fsdp import fully_shard

    calls = []

    def scatter(tensor, dim, group, *, is_mean):
        calls.append((dim, group.size(), is_mean))
        return tensor.chunk(group.size(), dim)[group.rank()] * (1 if is_mean else 10)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = torch.arange(8.0).reshape(2, 4)
    output = torch.empty(1, 4)
    name = "reduce_scatter_single" if hasattr(functional, "reduce_scatter_single") else "reduce_scatter_tensor"
    before = getattr(functional, name)
    end = torch_compat.replace_operator_sums(lambda group: True, scatter)
    parts = [getattr(functional, name)(x, "sum", 1, (mesh, 0)), getattr(functional, name)(x, "avg", 0, (mesh, 0))]
    torch_compat.reduce_scatter_single(output, x, group=mesh.get_group())
    end()
    own = fully_shard(nn.Linear(2, 2), mesh=mesh)
    ((group, gather, _),) = torch_compat.fsdp_groups(own)
    torch_compat.replace_collective(group, "reduce_scatter", gather)
    ((_, _, now),) = torch_compat.fsdp_groups(own)
    return calls, [part.tolist() for part in parts], output.tolist(), getattr(functional, name) is before, now is gather


def test_reduce_scatters_of_operators_are_replaced_until_that_ends():
    results = run_ranks(replaced, 2)
    x = torch.arange(8.0).reshape(2, 4)
    for rank, (calls, (columns, rows), output, is_back, is_set) in enumerate(results):
        assert calls == [(1, 2, False), (0, 2, True), (0, 2, False)]
        assert columns == (x.chunk(2, 1)[rank] * 10).tolist()
        assert rows == x.chunk(2, 0)[rank].tolist()
        assert output == (x.chunk(2, 0)[rank] * 10).tolist()
        assert is_back and is_set


def lone_groups():
    with shared_lone_groups():
        mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    apart = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    one, two, three = (mesh.get_group(name) for name in "abc")
    total = torch.ones(1)
    dist.all_reduce(total, group=two)
    return one is three, one is two, apart.get_group("a") is apart.get_group("c"), one.size(), float(total)


def test_dims_of_one_rank_share_a_group_of_it():
    assert run_ranks(lone_groups, 2) == [(True, False, False, 1, 2.0)] * 2


def test_a_rank_that_is_alone_asks_for_its_own_groups():
    asked = []
    with fake_world(8, rank=5):
        make = dist.distributed_c10d.new_group

        def counted(ranks=None, **options):
            asked.append(ranks)
            return make(ranks, **options)

        with pytest.MonkeyPatch.context() as patch, own_groups(5):
            patch.setattr(dist.device_mesh, "new_group", counted)
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        groups = [sorted(dist.get_process_group_ranks(mesh.get_group(name))) for name in "abc"]
    assert groups == [[1, 5], [5, 7], [4, 5]]
    assert all(5 in ranks for ranks in asked)
