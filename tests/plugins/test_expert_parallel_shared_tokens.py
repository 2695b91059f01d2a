"""Tokens that ranks of an inner axis hold parts of: all are exchanged, and their gradients are one device's."""

from __future__ import annotations

import copy

import pytest
import torch
from composer3d_plugins.sharding.expert_parallel.stacked_experts import shard_stacked
from support.mixtures import DIM, Stack
from support.models import largest
from torch.distributed.device_mesh import init_device_mesh

from composer3d import propagation
from composer3d.testing import run_ranks


def exchanged_under_tp(dispatch):
    """Return the largest error of what two ranks make of tokens that they share, and of its gradients."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    mesh, alone = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "tp")), Stack()
    layer, rank = copy.deepcopy(alone), mesh["tp"].get_local_rank()
    shard_stacked(layer, mesh["ep"], fqn="experts", dispatch=dispatch, note=lambda *rows: None, skew=1.0)
    whole = [torch.randn(6, DIM, requires_grad=True), torch.randn(6, 2, requires_grad=True)]
    index_TK, probe_TD = torch.randint(0, 4, (6, 2)), torch.randn(6, DIM)
    mine = [x.detach().chunk(2)[rank].requires_grad_() for x in whole]
    marks = propagation.Marks(2, frozenset({propagation.SEQUENCE}))
    hidden, weights, index = (
        marks.mark(x.view_as(x), propagation.Placed(dim=0, parts=(6,))) for x in (*mine, index_TK.chunk(2)[rank])
    )
    with propagation.Propagation(2, "block", mesh=mesh["tp"]):
        out_TD = layer.forward(hidden, index, weights)
    expected_TD = alone(whole[0], index_TK, whole[1])
    for result_TD in (out_TD, expected_TD):
        (result_TD * probe_TD).sum().backward()
    errors = [out_TD - expected_TD, *(own.grad - x.grad.chunk(2)[rank] for own, x in zip(mine, whole, strict=True))]
    return largest(float(error.detach().abs().max()) for error in errors)


@pytest.mark.parametrize("dispatch", ["all_to_all", "all_gather"])
def test_tokens_of_which_ranks_of_tp_hold_parts_are_exchanged_whole(dispatch):
    assert largest(run_ranks(exchanged_under_tp, 2, dispatch)) <= 1e-12
