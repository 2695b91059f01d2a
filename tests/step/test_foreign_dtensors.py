"""DTensors of a process that are no run's: what torch makes of them, during a run and after it was closed."""

from __future__ import annotations

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composer3d
from composer3d.testing import run_ranks


def outcomes(tensor):
    """Return what operators make of a tensor of 4 x 2, those among them that a run computes for its own."""
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for operator in (
        lambda: tensor.sum().item(),
        lambda: torch.renorm(tensor, 2, 1, 0.5),
        lambda: tensor + torch.ones(4, 2),
        lambda: tensor @ torch.ones(2, 2),
        lambda: nn.init.normal_(tensor.clone()),
        lambda: tensor.median(),
        lambda: torch._foreach_norm([tensor, torch.ones(2)]),
    ):
        try:
            result = operator()
            found.append(result.to_local().tolist() if isinstance(result, DTensor) else result)
        except (RuntimeError, NotImplementedError, composer3d.StepError) as error:
            found.append((type(error).__name__, str(error)[:80]))
    return found


def compared(path):
    """Return whether outcomes are those before the first composition: between, and after the last was closed."""
    whole = torch.arange(8.0).reshape(4, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("mine",))
    foreign = [distribute_tensor(whole, mesh, [placement]) for placement in (Shard(0), Replicate())]
    before = [outcomes(tensor) for tensor in foreign]
    same = []
    for _ in range(2):
        run, other = (composer3d.compose(lambda: nn.Linear(2, 4), path) for _ in range(2))
        other.close()
        same.append([outcomes(tensor) for tensor in foreign] == before)
        with torch.no_grad():
            run.model.weight.copy_(whole)
        own = outcomes(run.model.weight)
        run.close()
        same.append([outcomes(tensor) for tensor in foreign] == before)
        same.append(outcomes(run.model.weight)[0] == before[0][0])
    return before[0][:2], own[:2], same


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
def test_dtensors_that_are_no_runs_are_torchs():
    found = run_ranks(compared, 2, write_manifest("[sharding.fsdp2]\n"))
    for (before, own, same), local in zip(found, (6.0, 22.0), strict=True):
        assert before[0] == local and before[1][0] == "NotImplementedError"
        assert own[0] == 28.0 and not isinstance(own[1], tuple)
        assert same == [True] * 6
