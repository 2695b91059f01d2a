"""What overlaps exchanges with other work: torch's fusing pass, and all-gathers of units that begin early."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

from composer3d import torch_compat
from composer3d.testing import fake_world, run_ranks


def both(x_LD, up_DF, down_FD):
    group = dist.group.WORLD
    gathered = functional.all_gather_tensor(x_LD, gather_dim=0, group=group) @ up_DF
    return functional.reduce_scatter_tensor(torch.relu(gathered) @ down_FD, "sum", scatter_dim=0, group=group)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("has_nccl", [True, False])
def test_the_pass_is_counted(monkeypatch, has_nccl):
    """Without NCCL torch's pass returns at once, and says nothing."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    with fake_world(2), _test_mode():
        fused, end = torch_compat.micro_pipeline([])
        from torch._inductor.fx_passes import post_grad

        try:
            graph = make_fx(both, tracing_mode="fake")(torch.rand(8, 16), torch.rand(16, 32), torch.rand(32, 16)).graph
            assert torch._inductor.config._micro_pipeline_tp
            post_grad.micro_pipeline_tp_pass(graph)
        finally:
            end()
    assert (fused.gathered, fused.summed, fused.found) == ((1, 1, 2) if has_nccl else (0, 0, 2))
    assert torch._inductor.config._micro_pipeline_tp is False


def test_what_symmetric_memory_lacks_is_told():
    assert "this run is on cpu" in str(torch_compat.lacking_symmetric_memory(torch.device("cpu"), 2))


def gathered(is_written, is_confirmed):
    """Return the weight that a unit computes with, and how many numbers ranks agreed on."""
    torch.manual_seed(0)
    unit = nn.Linear(5, 4)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    torch_compat.watch_units(unit)
    unit(torch.ones(1, 5)).sum().backward()
    torch_compat.gather_early(unit)
    if is_written and dist.get_rank() == 1:  # one rank alone
        unit.weight.to_local().data.fill_(7.0)
    agreed = []

    def agree(group, changed):
        flags = torch.tensor(changed, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        agreed.append(flags.tolist())
        return [bool(flag) for flag in flags.tolist()]

    if is_confirmed:
        torch_compat.confirm_early([unit], compare=True, agree=agree)
    with torch.no_grad():
        found = unit(torch.eye(5)) - unit(torch.zeros(5, 5))
    unit.reshard()  # a root stays gathered after its forward
    torch_compat.gather_early(unit)
    torch_compat.drop_early([unit])
    return found.T, unit.weight.full_tensor(), agreed


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("is_confirmed", [True, False])
def test_what_is_gathered_early_is_what_shards_hold(is_written, is_confirmed):
    for found, weight, agreed in run_ranks(gathered, 2, is_written, is_confirmed):
        assert torch.allclose(found, weight, atol=1e-6)
        assert bool((weight == 7).any()) == is_written
        assert agreed == ([[int(is_written)]] if is_confirmed else [])
