"""Pipelines some of whose stages hold frozen parameters alone, against one device in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from support.skipping_models import Skipping
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.testing import assert_gradients_equal, run_ranks

TOLERANCE = 1e-12
FAST = ("1F1B", "Interleaved1F1B")
SCHEDULES = (*FAST, "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble")
PIPELINE = (
    'composer3d = 1\nmodel.blocks = "layers.*"\ntrain.microbatch = 2\nmesh.pp = 2\nscheduling.pipeline.schedule = '
)
FSDP = "mesh.dp_shard = 2\n[sharding.fsdp2]\n"
# Of four blocks, two a rank or one a stage: a rank without trained parameters, or a stage in the middle or at the end.
FROZEN = {"first": (0, 1), "middle": (1, 2), "last": (2, 3), "all but the last": (0, 1, 2)}


def loss_fn(output, target):
    return cross_entropy(output.flatten(0, -2), target.flatten())


def steps(path, frozen, kept=()):
    """Run two steps on a rank and on one device; return the number of parameters that the rank trains."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = Skipping(4, frozen=frozen, kept=kept), *torch.randint(64, (2, 16, 8))
    reference = copy.deepcopy(model)
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    one = torch.optim.AdamW(trained, lr=0.1)
    run = composer3d.compose(model, path, loss_fn=loss_fn)
    several = run.optimizer(torch.optim.AdamW, lr=0.1)
    size, rank = 16 // run.context.data_parallel_degree, run.context.data_parallel_rank
    mine = slice(rank * size, (rank + 1) * size)
    for number in range(2):
        expected = loss_fn(reference(x), y)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        with run.step(number):
            loss = run.forward_backward(x[mine], target=y[mine])
            assert float(run.clip_grad_norm_(0.5)) == pytest.approx(norm.item(), abs=TOLERANCE)
            gradients = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
            several.step()
            several.zero_grad()
        assert float(loss) == pytest.approx(expected.item(), abs=TOLERANCE)
        own = {fqn: p.grad for fqn, p in reference.named_parameters() if fqn in dict(run.named_parameters())}
        assert gradients.keys() == {fqn for fqn, grad in own.items() if grad is not None}
        assert_gradients_equal(gradients, {fqn: own[fqn] for fqn in gradients}, tolerance=TOLERANCE)
        one.step()
        one.zero_grad()
    run.close()
    return len(gradients)


@pytest.mark.parametrize("schedule", [pytest.param(s, marks=() if s in FAST else pytest.mark.slow) for s in SCHEDULES])
def test_gradients_are_those_of_one_device(schedule, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'{PIPELINE}"{schedule}"\n')
    numbers = {name: run_ranks(steps, 2, path, frozen, kept) for name, frozen in FROZEN.items() for kept in ((), (0,))}
    assert (0 in numbers["first"]) == (schedule in ("1F1B", "GPipe"))
    assert 0 in numbers["all but the last"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_stages_do_so_too(schedule, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'{PIPELINE}"{schedule}"\n{FSDP}'.replace("microbatch = 2", "microbatch = 1"))
    # Every rank compares its gradients with one device's, and some have gradients.
    numbers = [run_ranks(steps, 4, path, frozen) for frozen in FROZEN.values()]
    assert all(max(each) > 0 for each in numbers)
