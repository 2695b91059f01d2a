"""What a loop draws for the parameters of a pipeline, and norms that it computes of their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import Even, write_manifest
from torch import nn
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.testing import run_ranks

PIPELINE = "[train]\nmicrobatch = 3\n[mesh]\npp = 2\n[scheduling.pipeline]\n"
SHARDED = "[train]\nmicrobatch = 3\n[mesh]\npp = 2\ndp_shard = 2\n[scheduling.pipeline]\n[sharding.fsdp2]\n"


def loss_fn(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def drawn(named):
    for name, parameter in named:
        nn.init.trunc_normal_(parameter, std=0.05)
        if name.endswith("weight"):
            parameter.data.add_(torch.randn_like(parameter.data), alpha=0.01)


def said(call):
    with pytest.raises(composer3d.StepError) as caught:
        call()
    return str(caught.value)


def loop(path):
    """Draw for all parameters; return differences to one device, the next number of both, and refusals."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, tokens = Even(), torch.arange(36).reshape(6, 6) % 11
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path, loss_fn=loss_fn, example=((tokens[:3],), {}))
    torch.manual_seed(4)
    drawn(reference.named_parameters())
    expected = float(torch.rand(()))
    torch.manual_seed(4)
    drawn(run.named_parameters(of_all_stages=True))
    after = float(torch.rand(())) - expected
    whole = dict(reference.named_parameters())
    found = [float((run.full_tensor(n, p) - whole[n]).abs().max().detach()) for n, p in run.named_parameters()]
    refused = [said(lambda: drawn(run.named_parameters()))]
    for number, (_, parameter) in enumerate(run.named_parameters()):
        torch.manual_seed(number)  # whoever seeds for each parameter draws the same in any layout
        nn.init.normal_(parameter)
    run.optimizer(torch.optim.SGD, lr=0.1)
    run.forward_backward(tokens, target=tokens)
    parameters = [parameter for _, parameter in run.named_parameters()]
    refused.append(said(lambda: nn.utils.clip_grad_norm_(parameters, 0.1)))
    run.close()
    return max(found), after, refused


@pytest.mark.parametrize("world_size, text", [(2, PIPELINE), pytest.param(4, SHARDED, marks=pytest.mark.slow)])
def test_draws_for_all_stages_are_one_devices_and_those_of_one_stage_are_refused(world_size, text):
    for difference, after, (draws, norm) in run_ranks(loop, world_size, write_manifest(text)):
        assert (difference, after) == (0.0, 0.0)
        assert draws.endswith("write for fqn, parameter in run.named_parameters(of_all_stages=True):")
        assert norm.endswith("would clip by another one; write run.clip_grad_norm_(max_norm)")
