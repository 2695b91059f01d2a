"""Modules of a composed model that a loop, or the model, calls through torch.func."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
TENSOR = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
LAYOUTS = ["[sharding.fsdp2]\n", "[sharding.ddp]\n"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """A model that may call one of its modules with other weights, which it makes of the module's."""

    def __init__(self):
        super().__init__()
        self.layers, self.head, self.doubled = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 3), ""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if not self.doubled:
            return self.head(x)
        module = self.get_submodule(self.doubled)
        return functional_call(module, twice(module), (x,)).sum(-1, keepdim=True)


def twice(module):
    return {name: parameter * 2 for name, parameter in module.named_parameters()}


def whole(module):
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {name: t.full_tensor() * 2 if hasattr(t, "full_tensor") else t * 2 for name, t in tensors.items()}


def composed(path):
    """Return a run, its one device, their optimizers, this rank's samples, and all."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path)
    optimizers = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    rank, size = run.context.data_parallel_rank, 4 // run.context.data_parallel_degree
    return run, reference, optimizers, x[rank * size : (rank + 1) * size], x


def step_error(run, reference, optimizers):
    """Step both, and return how far their parameters are apart."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(reference.named_parameters())
    return max(
        float((run.full_tensor(fqn, p) - expected[fqn]).detach().abs().max()) for fqn, p in run.named_parameters()
    )


def refused(path):
    """Return what is said of modules that are given other tensors, and how far a step after each is off."""
    run, reference, optimizers, mine, x = composed(path)
    said, errors = {}, []
    for fqn in ("head", "layers.0", "layers.1.up"):
        module = run.model.get_submodule(fqn)
        for made in (twice, whole):
            with pytest.raises(composer3d.StepError) as caught:
                functional_call(module, made(module), (mine,))
            said[f"{fqn} {made.__name__}"] = str(caught.value)
            reference(x).square().mean().backward()
            run.backward(run.model(mine).square().mean())
            errors.append(step_error(run, reference, optimizers))
    run.model.doubled = "layers.1"
    with pytest.raises(composer3d.StepError) as caught:
        run.model(mine)
    run.close()
    return said | {"layers.1 own": str(caught.value)}, max(errors)


@pytest.mark.parametrize("text", LAYOUTS)
def test_tensors_in_the_place_of_a_modules_parameters_are_refused_and_leave_nothing_behind(text):
    for said, error in run_ranks(refused, 2, write_manifest(text)):
        for case, message in said.items():
            fqn = case.split()[0]
            first = f"{fqn}.up.weight" if fqn.count(".") == 1 else f"{fqn}.weight"
            assert message.startswith(f'the forward is given a tensor for "{first}" (torch.func.functional_call)'), case
            assert message.endswith(f'of the weights of "{first[:-7]}" is computed in its own forward'), case
        assert error < TIGHT


def gathered_head(model, x):
    """The head has no unit of its own: in the model's forward it is gathered, as on one device."""
    model.doubled = "head"
    result = model(x)
    model.doubled = ""
    return result


def same_block(block, x):
    return functional_call(block, dict(block.named_parameters()), (x,)) * block(x)


CALLS = {
    "own": gathered_head,
    "same": lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)) + m(x),
    "same block": lambda m, x: same_block(m.layers[0], x),
    "vmap": lambda m, x: vmap(m)(x),
    "vmap of a part": lambda m, x: vmap(m.layers[0].up)(x),
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),))[1],
    "jvp of a unit": lambda m, x: jvp(m.layers[1], (x,), (x.cos(),))[1],
    "grad": lambda m, x: vmap(grad(lambda sample: m.head(m.layers[1](sample)).square().sum()))(x),
}
OWN_WARNING = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # jvp's, in torch 2.13


def differences(path, names):
    """Return, by name of the call, how far a forward without gradients is off, and a step."""
    run, reference, optimizers, mine, x = composed(path)
    found = {}
    for name in names:
        with torch.no_grad():
            forward = CALLS[name](run.model, mine) - CALLS[name](reference, mine)
        CALLS[name](reference, x).square().mean().backward()
        run.backward(CALLS[name](run.model, mine).square().mean())
        found[name] = max(float(forward.abs().max()), step_error(run, reference, optimizers))
    run.close()
    return found


@OWN_WARNING
@pytest.mark.parametrize("text", LAYOUTS)
def test_transforms_of_modules_equal_one_device(text):
    for found in run_ranks(differences, 2, write_manifest(text), tuple(CALLS)):
        assert {name: error for name, error in found.items() if not error < TIGHT} == {}


@pytest.mark.slow
def test_transforms_of_whole_modules_equal_one_device_beside_tensor_parallelism():
    for found in run_ranks(
        differences, 4, write_manifest(f"{TENSOR}[sharding.fsdp2]\n"), ("own", "same", "same block")
    ):
        assert {name: error for name, error in found.items() if not error < TIGHT} == {}


def through_shards(path):
    run, _, _, mine, _ = composed(path)
    for call in ("vmap", "jvp of a unit", "grad"):
        with pytest.raises(
            composer3d.TransformError, match="DTensor has no rule for it; call the model with the whole"
        ):
            CALLS[call](run.model, mine)
    run.close()


@OWN_WARNING
def test_transforms_through_sharded_layers_are_refused():
    run_ranks(through_shards, 2, write_manifest(TENSOR))
