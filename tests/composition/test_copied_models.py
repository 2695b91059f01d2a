"""Copies of composed models in a loop: averages, teachers and targets, beside one device."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from support.family_models import GPT2
from support.models import write_manifest
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import composer3d
from composer3d import StepError
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "fsdp2, gathered": "[sharding.fsdp2]\nzero = 1\n",
    "ddp": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}
TIGHT = 1e-12
TOKENS = torch.arange(48).reshape(8, 6) * 7 % 11
WHOLE = TOKENS.flip(1)


def copies(model):
    """Return a teacher, an exponential average and a plain one of a model."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    return teacher, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), AveragedModel(model)


def trained(model, optimizer, backward, part, whole_state):
    """Train beside copies that follow; return their outputs."""
    teacher, moving, mean = copies(model)
    for step in range(3):
        x = part(TOKENS.roll(step, 1))
        with torch.no_grad():
            before = teacher(x)
        logits = model(x)
        between = teacher(x)  # while the backward is still to come
        assert torch.equal(before, between)
        backward(F.cross_entropy(logits.flatten(0, 1), x.flatten()) + 0.1 * F.mse_loss(logits, between))
        optimizer.step()
        optimizer.zero_grad()
        moving.update_parameters(model)
        mean.update_parameters(model)
        for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
            own.data.mul_(0.5).add_(other.data, alpha=0.5)
    again = copy.deepcopy(teacher)
    with torch.no_grad():
        found = [each(WHOLE) for each in (teacher, moving, mean, again)]
        teacher.load_state_dict(model.state_dict())
        found.append(teacher(WHOLE))
        again.load_state_dict(whole_state())
        return [*found, again(WHOLE), model(WHOLE)]


def one_device():
    torch.manual_seed(0)
    model = GPT2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trained(model, optimizer, lambda loss: loss.backward(), lambda x: x, model.state_dict)


def beside_one_device(path):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    run = composer3d.compose(GPT2(), path, example=((TOKENS,), {}))
    optimizer, degree = run.optimizer(torch.optim.SGD, lr=0.1), run.context.data_parallel_degree

    def whole_state():
        return {fqn: run.full_tensor(fqn, value) for fqn, value in run.model.state_dict().items()}

    def part(x):
        return x.chunk(degree)[run.context.data_parallel_rank]

    found = trained(run.model, optimizer, run.backward, part, whole_state)
    run.close()
    return [float((own - other).abs().max()) for own, other in zip(found, one_device(), strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_that_follow_a_model_are_those_of_one_device(layout):
    for errors in run_ranks(beside_one_device, 2, write_manifest(LAYOUTS[layout])):
        assert max(errors) < TIGHT


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
        self.last.weight.multiplier = 3.0

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def kept(path):
    """Return what a forward of a copy leaves of the model, of the copy, and of what a parameter carries."""
    run = composer3d.compose(Normalised(), path)
    copied = copy.deepcopy(run.model)
    with torch.no_grad():
        copied(torch.ones(3, 4) + torch.arange(3.0)[:, None])
    own, other = run.model.norm.num_batches_tracked, copied.norm.num_batches_tracked
    types = type(copied).__mro__[2] is Normalised and isinstance(copied.norm, nn.BatchNorm1d)
    copied.eval()
    with torch.no_grad():
        copied(torch.ones(3, 4))
    return int(own), int(other), types, run.model.training, copied.last.weight.multiplier


def test_a_copy_has_buffers_modes_and_attributes_of_its_own():
    assert run_ranks(kept, 2, write_manifest(LAYOUTS["fsdp2"])) == [(0, 1, True, True, 3.0)] * 2


def copied_parameters(path):
    """Return whether copies of parameters alone, as loops keep them, stay when the model is trained."""
    run = composer3d.compose(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), path)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    kept = copy.deepcopy(dict(run.model.named_parameters()))
    before = {fqn: run.full_tensor(fqn, value).clone() for fqn, value in run.model.named_parameters()}
    run.backward(run.model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    found = [torch.equal(kept[fqn].full_tensor(), value) for fqn, value in before.items()]
    with torch.no_grad():
        for fqn, parameter in run.model.named_parameters():
            parameter.copy_(kept[fqn])
    found += [torch.equal(run.full_tensor(fqn, p), before[fqn]) for fqn, p in run.model.named_parameters()]
    run.close()
    return all(found)


def test_copies_of_parameters_are_kept_and_written_back():
    assert run_ranks(copied_parameters, 2, write_manifest(LAYOUTS["fsdp2"])) == [True, True]


def refused(path):
    """Return what is said where a copy would need gradients, and where it is saved."""
    run = composer3d.compose(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), path)
    copied, x, said = copy.deepcopy(run.model), torch.ones(2, 4), []
    frozen = copy.deepcopy(copied).requires_grad_(False)
    for act in (
        lambda: copied(x),
        lambda: frozen(x.clone().requires_grad_()),
        lambda: torch.save(frozen.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(StepError) as caught:
            act()
        said.append(str(caught.value))
    run.close()
    return said


def test_gradients_of_a_copy_and_files_of_its_shards_are_refused_with_the_line_to_write():
    assert (
        run_ranks(refused, 2, write_manifest(LAYOUTS["fsdp2"]))
        == [
            [
                "a copy of a composed model computes no gradients; call it under torch.no_grad(), or write "
                "copied.requires_grad_(False) once, or compose a second model from its weights",
                "a copy of a composed model computes no gradients, and its input needs some; call it with detached "
                "inputs under torch.no_grad(), or compose a second model from its weights",
                "torch.save of run.model.state_dict() would write the shards of this rank alone; on all ranks write "
                'run.save("checkpoints/100"), or state = run.full_state_dict(), which the first rank then saves',
            ]
        ]
        * 2
    )
