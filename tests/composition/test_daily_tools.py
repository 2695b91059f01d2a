"""What loops use every day beside a composition: samplers, scalers, metrics, compiled models, generation."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.models import Even, composed, mean_loss, mine, seeded, unpadded, write_manifest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import composer3d
from composer3d import StepError
from composer3d.testing import full, run_ranks

LAYOUT = "[sharding.fsdp2]\n"
DATA = TensorDataset(torch.arange(12))
SAMPLERS = {
    "random": lambda draw: {"sampler": RandomSampler(DATA, generator=draw), "batch_size": 4},
    "weighted": lambda draw: {"sampler": WeightedRandomSampler(range(12), 12, generator=draw), "batch_size": 4},
    "subset": lambda draw: {"sampler": SubsetRandomSampler(range(8), generator=draw), "batch_size": 4},
    "of batches": lambda draw: {"batch_sampler": BatchSampler(RandomSampler(DATA, generator=draw), 6, drop_last=True)},
    "a list": lambda draw: {"batch_sampler": [[0, 1], [2, 3, 4, 5]]},
}


def read(name):
    """Return the batches of one device, and this rank's parts of them."""
    run, found = composed(LAYOUT), []
    for prepare in (lambda loader: loader, run.loader):
        loader = prepare(DataLoader(DATA, **SAMPLERS[name](torch.Generator().manual_seed(1))))
        found.append([batch.tolist() for (batch,) in loader])
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_read_the_batches_of_any_sampler(name):
    (alone, first), (_, second) = run_ranks(read, 2, name)
    assert alone == [a + b for a, b in zip(first, second, strict=True)] and len(alone) > 1


def refused():
    run, found = composed(LAYOUT), []
    with pytest.raises(StepError) as error:
        run.loader(DataLoader(DATA, sampler=DistributedSampler(DATA), batch_size=4))
    found.append(str(error.value))
    optimizer, scaler = run.optimizer(torch.optim.AdamW, lr=1e-2), torch.amp.GradScaler("cpu")
    tokens, targets = unpadded()
    run.backward(scaler.scale(mean_loss(run.model(mine(run, tokens)), mine(run, targets))))
    with pytest.raises(StepError) as error:
        scaler.step(optimizer)
    found.append(str(error.value))
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)  # which is the optimizer's own step
    return found


def test_what_would_lose_samples_or_part_ranks_is_refused():
    for loader, scaler in run_ranks(refused, 2):
        assert "a DistributedSampler, whose part of the samples it would divide again" in loader
        assert "leave it out, and name a plugin of [precision] with param_dtype = float16" in scaler


def unscaled():
    run = composed("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n", seeded(Even))
    optimizer, scaler = run.optimizer(torch.optim.SGD, lr=1e-2), torch.amp.GradScaler("cpu")
    tokens, targets = unpadded()
    run.backward(scaler.scale(mean_loss(run.model(tokens), targets)))
    with pytest.raises(StepError) as error:
        scaler.unscale_(optimizer)
    return str(error.value)


def test_a_scaler_of_the_loop_is_refused_where_it_unscales_plain_and_sharded_gradients():
    for scaler in run_ranks(unscaled, 2):
        assert "leave it out, and name a plugin of [precision] with param_dtype = float16" in scaler


def measured():
    metrics = pytest.importorskip("torchmetrics")
    run = composed(LAYOUT)
    scores_BC = torch.eye(4)[torch.arange(12) % 4]
    targets_B = torch.arange(12) // 2 % 4
    both = [metrics.classification.MulticlassAccuracy(num_classes=4, average="micro") for _ in range(2)]
    both[0].update(mine(run, scores_BC), mine(run, targets_B))
    both[1](scores_BC, targets_B)
    return both[0].compute().item(), both[1].compute().item()


def test_metrics_of_torchmetrics_are_those_of_all_ranks():
    for together, alone in run_ranks(measured, 2):
        assert together == alone


def compiled():
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")  # dynamo's, of the hooks around the model's forward, which it leaves out
    run, reference = composed(LAYOUT), seeded()
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    tokens, targets = unpadded()
    with pytest.raises(StepError, match="or write model = torch.compile"):
        run.model.compile(backend="eager")
    model = torch.compile(run.model, backend="eager")
    for _ in range(2):
        run.backward(mean_loss(model(mine(run, tokens)), mine(run, targets)))
        mean_loss(reference(tokens), targets).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    wanted = {name: p.detach() for name, p in reference.named_parameters()}
    error = max(float((run.full_tensor(n, p.detach()) - wanted[n]).abs().max()) for n, p in run.named_parameters())
    return error, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled_floats(text):
    """Return the error of two steps of a compiled model whose inputs are float64, which the guard reads as words."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    reference, x = copy.deepcopy(model), torch.randn(2, 4, 6)
    run = composer3d.compose(model, write_manifest(text))
    forward = torch.compile(run.model, backend="aot_eager")
    for rows in x:
        reference(rows).pow(2).mean().backward()
        run.backward(forward(mine(run, rows)).pow(2).mean())
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    return max(float((full(p.grad) - wanted[name]).abs().max()) for name, p in run.named_parameters())


@pytest.mark.slow
def test_a_model_that_is_compiled_whole_trains_as_one_that_is_not():
    for error, num_graphs in run_ranks(compiled, 2):
        assert error < 1e-12 and num_graphs > 0


@pytest.mark.slow
@pytest.mark.parametrize("text", [LAYOUT, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"], ids=["fsdp2", "ddp"])
def test_what_a_step_does_around_a_compiled_forward_is_not_compiled(text):
    assert max(run_ranks(compiled_floats, 2, text)) < 1e-12
