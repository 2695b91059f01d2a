"""Tensors of one device's model on their way into a sharded model, and out of it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from support.family_models import GPT2
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "fsdp2, gathered": "[sharding.fsdp2]\nzero = 1\n",
    "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}
TOKENS = torch.arange(24).reshape(4, 6) % 11


def composed(path, seed):
    """Return a run of a model with a fused projection of query, key and value, and another model of that class."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model, other = GPT2(), GPT2()
    return composer3d.compose(model, path, example=((TOKENS,), {})), copy.deepcopy(other)


def cross_entropy(model):
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


def loaded(path):
    """Return differences of a step after another model's state was loaded in the middle of training."""
    run, other = composed(path, seed=0)
    optimizer, reference = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    run.backward(cross_entropy(run.model))
    optimizer.step()
    optimizer.zero_grad()
    run.model(TOKENS)  # gathers
    run.model.load_state_dict(other.state_dict())
    cross_entropy(other).backward()
    run.backward(cross_entropy(run.model))
    expected = dict(other.named_parameters())
    found = [
        float((run.full_tensor(fqn, value) - other_value).detach().abs().max())
        for fqn, parameter in run.named_parameters()
        for value, other_value in ((parameter, expected[fqn]), (parameter.grad, expected[fqn].grad))
    ]
    optimizer.step()
    reference.step()
    state = run.full_state_dict()
    found += [float((value - state[fqn]).abs().max()) for fqn, value in other.state_dict().items() if state]
    run.close()
    return max(found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_of_one_device_is_loaded_into_any_layout(layout):
    assert max(run_ranks(loaded, 2, write_manifest(LAYOUTS[layout]))) <= 1e-13


def raised(function):
    with pytest.raises(composer3d.StepError) as caught:
        function()
    return str(caught.value)


def refusals(path):
    """Return what is said to saving tensors in a dict of the loop's own, and to replacing parameters."""
    run = composer3d.compose(nn.Linear(5, 7), path)
    state = nn.Linear(5, 7).state_dict()
    found = [
        raised(lambda: torch.save({fqn: value.cpu() for fqn, value in run.model.state_dict().items()}, io.BytesIO())),
        raised(lambda: torch.save(dict(run.model.named_parameters()), io.BytesIO())),
        raised(lambda: run.model.load_state_dict(state, assign=True)),
        raised(lambda: torch.save(run.model, io.BytesIO())),
    ]
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        run.model.load_state_dict({**state, "weight": torch.zeros(7, 6)})
    # The compiler's cache pickles meshes, and a whole tensor is no shard.
    assert pickle.loads(pickle.dumps(run.mesh)).shape == run.mesh.shape
    torch.save({fqn: run.full_tensor(fqn, value) for fqn, value in run.named_parameters()}, io.BytesIO())
    run.close()
    return found


def test_shards_are_not_saved_by_torch_and_parameters_not_replaced():
    (found,) = {tuple(each) for each in run_ranks(refusals, 2, write_manifest("[sharding.fsdp2]\n"))}
    saved = (
        "torch.save of a parameter, or of a tensor sharded like one, would write the shard of this rank alone; on all "
        'ranks write state = run.full_state_dict(), which the first rank then saves, or run.save("checkpoints/100")'
    )
    assert found == (
        saved,
        saved,
        'load_state_dict(assign=True) would put another tensor in the place of "weight", which is sharded, and in that '
        "of the optimizer's; leave assign out",
        "torch.save of a composed model would write the shards and hooks of this rank alone; on all ranks write "
        "state = run.full_state_dict(), which the first rank then saves and a model of one device loads, or "
        'run.save("checkpoints/100")',
    )
