"""What loops read between steps: forwards without a backward gather parameters, and nobody may see them gathered."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import composed, gradient_error, mine, seeded, unpadded
from torch import nn

from composer3d import TransformError, torch_compat
from composer3d.runner.weights.ema import EMA
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"
LAYOUTS = [
    "[sharding.fsdp2]\nzero = 1\n",
    "[sharding.fsdp2]\nzero = 3\n",
    "[sharding.ddp]\n[mesh]\ndp_replicate = -1\n",
]


def mean(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step(run, number, optimizer, tokens, targets):
    with run.step(number):
        run.backward(mean(run.model, tokens, targets))
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def one_device(steps):
    """Return the model after some steps of AdamW on one device."""
    tokens, targets = unpadded()
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        mean(model, tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def read(run, path, forward):
    """Read parameters in every way that a loop has, each after a forward that gathered them."""
    shards = {fqn: type(parameter.data) for fqn, parameter in run.named_parameters()}
    state = {fqn: type(tensor) for fqn, tensor in run.model.state_dict().items()}  # plain, where each rank has all
    forward()
    assert {fqn: type(parameter.data) for fqn, parameter in run.named_parameters()} == shards
    forward()
    assert {fqn: type(tensor) for fqn, tensor in run.model.state_dict().items()} == state
    forward()
    average = EMA(run, decay=0.5)
    forward()
    average.update(0)
    forward()
    with average.applied():
        pass
    forward()
    run.save(path)


def evaluated(layout, how, path):
    torch.set_default_dtype(torch.float64)
    run = composed(layout)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())

    def forward():
        with how():
            run.model(tokens)

    forward()
    step(run, 0, optimizer, tokens, targets)
    read(run, path, forward)
    step(run, 1, optimizer, tokens, targets)
    with run.step(2):
        run.backward(mean(run.model, tokens, targets))
        forward()  # for a metric
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    error = max(float((trained[fqn] - p).abs().max()) for fqn, p in one_device(3).state_dict().items())
    run.load(path)
    loaded = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    return error, max(float((loaded[fqn] - p).abs().max()) for fqn, p in one_device(1).state_dict().items())


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["zero 1", "zero 3", "ddp"])
def test_forwards_without_a_backward_leave_nothing_gathered(layout, how, tmp_path):
    for trained, loaded in run_ranks(evaluated, 2, layout, how, tmp_path / "step-1"):
        assert trained < TIGHT
        assert loaded < TIGHT


def forward_between(layout):
    """Run a forward without gradients between a forward and its backward, as distillation from oneself does."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = unpadded()
    reference = seeded()
    mean(reference, tokens, targets).backward()
    run = composed(layout)
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(0):
        loss = mean(run.model, tokens, targets)
        with torch.no_grad():
            run.model(tokens)
        run.backward(loss)
        run.clip_grad_norm_(float("inf"))
        return gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize("layout", LAYOUTS, ids=["zero 1", "zero 3", "ddp"])
def test_a_forward_without_gradients_before_a_backward(layout):
    assert max(run_ranks(forward_between, 2, layout)) < TIGHT


def drawn():
    """Draw data between, before and after the forwards of a step; return it with what one device's loop draws."""
    run = composed("[sharding.fsdp2]\n", model=seeded(dropout=0.5))
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    torch.manual_seed(run.context.rank)
    numbers = []
    for number in range(2):
        with run.step(number):
            for is_last in (False, True):
                numbers.append(torch.rand(()))
                loss = mean(run.model, tokens, targets)
                numbers.append(torch.rand(()))
                run.backward(loss, last=is_last)
                numbers.append(torch.rand(()))
            run.clip_grad_norm_(1.0)
    torch.manual_seed(run.context.rank)
    return torch.stack(numbers).equal(torch.stack([torch.rand(()) for _ in numbers]))


def test_what_a_loop_draws_comes_from_its_own_generator():
    assert run_ranks(drawn, 2) == [True, True]


def checkpointed(text):
    """Return the gradient of a step whose forward draws."""
    torch.set_default_dtype(torch.float64)
    run = composed(text, model=seeded(dropout=0.5))
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    with run.step(0):
        loss = mean(run.model, tokens, targets)
        torch.rand(3)
        run.backward(loss)
        run.clip_grad_norm_(float("inf"))
        return {fqn: full(parameter.grad) for fqn, parameter in run.named_parameters()}


def test_recomputed_dropout_is_that_of_the_forward():
    plain = run_ranks(checkpointed, 2, "[sharding.fsdp2]\n")[0]
    recomputed = run_ranks(checkpointed, 2, "[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n")[0]
    assert all(torch.equal(plain[fqn], recomputed[fqn]) for fqn in plain)


class Averaged(nn.Module):
    """Batch norm, whose statistics differ on ranks that see other samples."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def rolled_back(layout):
    """Return how far a model and its moments are from what they were after steps that were rolled back."""
    run = composed(layout)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    differences = []
    for _ in range(2):
        step(run, 0, optimizer, tokens, targets)
        kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(run.model.state_dict())
        before = run.full_state_dict(), full(optimizer.state_dict()["state"][0]["exp_avg"]).clone()
        step(run, 1, optimizer, tokens, targets)
        optimizer.load_state_dict(copy.copy(kept[0]))
        run.model.load_state_dict(copy.copy(kept[1]))
        after = run.full_state_dict(), full(optimizer.state_dict()["state"][0]["exp_avg"])
        differences += [bool((before[0][fqn] != tensor).any()) for fqn, tensor in after[0].items()]
        differences.append(bool((before[1] != after[1]).any()))
    return any(differences)


@pytest.mark.parametrize("layout", [FSDP, "[sharding.ddp]\n"])
def test_states_are_copied_in_memory(layout):
    assert run_ranks(rolled_back, 2, layout) == [False] * 2


class Transposed(nn.Module):
    """A model with a parameter that is not contiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(7, 6)
        self.weight = nn.Parameter(torch.randn(7, 6).t())

    def forward(self, tokens):
        return self.tok(tokens) @ self.weight


def transposed(layout):
    run = composed(layout, model=Transposed().double())
    tokens = torch.arange(8).view(2, 4) % 7
    run.backward(mean(run.model, tokens, tokens))
    model = Transposed().double()
    mean(model, tokens, tokens).backward()
    return float((run.full_tensor("weight", run.model.weight.grad) - model.weight.grad).abs().max())


@pytest.mark.parametrize("layout", [FSDP, "[sharding.ddp]\n"])
def test_parameters_that_are_not_contiguous_are_trained(layout):
    assert max(run_ranks(transposed, 2, layout)) < TIGHT


def copied_whole():
    """Keep an average of a model that is whole on every rank, as loops of one device do."""
    torch.set_default_dtype(torch.float64)
    run = composed("", loss_fn=None)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    step(run, 0, optimizer, *unpadded())
    average.update_parameters(run.model)
    with run.step(1):
        average(unpadded()[0])  # no forward of this run
        run.backward(mean(run.model, *unpadded()))
        optimizer.step()
    return torch.equal(average.module.tok.weight, seeded().tok.weight)


def test_a_whole_model_is_averaged_as_on_one_device():
    assert run_ranks(copied_whole, 1) == [False]


def synchronised():
    run = composed("[sharding.ddp]\n", model=seeded(Averaged))
    torch.manual_seed(run.context.rank)
    run.model(torch.randn(6, 3))
    own = run.model.norm.running_mean.clone()
    run.sync_buffers()
    return own, run.model.norm.running_mean.clone()


def test_buffers_of_a_loop_are_averaged():
    (one, mean_one), (two, mean_two) = run_ranks(synchronised, 2)
    assert not torch.equal(one, two)
    assert torch.equal(mean_one, mean_two)
    assert torch.allclose(mean_one, (one + two) / 2)


class RunningNormaliser(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 1), nn.BatchNorm1d(3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            self.centre.mul_(0.5).add_(0.5 * x.mean(0))
        return self.linear(self.norm(x) + (x - self.centre) * self.scale)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        self.calls += 1
        self.positive += (x > 0).sum(0)
        self.seen |= (x > 2).any(0)
        return super().forward(x)


def diverged(make):
    """Return what is warned of after two averages of buffers that differ between ranks."""
    records = []
    logging.getLogger("composer3d.step.buffers").addFilter(lambda record: records.append(record.getMessage()))
    run = composed("[sharding.ddp]\n", model=make())
    for seed in range(2):
        torch.manual_seed(2 * seed + run.context.rank)
        run.model(torch.randn(6, 3))
        run.sync_buffers()
    return records


def test_buffers_that_differ_and_are_no_batch_norms_are_named_once():
    (message,), none = run_ranks(diverged, 2, RunningNormaliser)
    assert "differ between data-parallel ranks: centre; they are averaged here" in message
    assert "run.sync_buffers() after every optimizer.step(), which averages them, is enough" in message and not none


def test_whole_numbers_that_differ_are_named_once():
    (message,), none = run_ranks(diverged, 2, Counting)
    assert "differ between data-parallel ranks: positive; they are not averaged, every rank goes on" in message
    assert not none


def late():
    """Return which group's timeout is what was asked for."""
    run = composed(FSDP, timeout_s=12.5)
    groups = [dist.group.WORLD, *(run.mesh.get_group(axis) for axis in run.mesh.mesh_dim_names)]
    return {torch_compat.group_timeout(group, torch.device("cpu")).total_seconds() for group in groups}


def test_a_loop_sets_a_timeout():
    assert run_ranks(late, 2) == [{12.5}] * 2


def compiled(whole):
    model = seeded()
    if whole:
        model = torch.compile(model, backend="eager")
    else:
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(TransformError) as caught:
        composed(FSDP, model=model)
    return str(caught.value)


@pytest.mark.parametrize(("whole", "what"), [(True, "the model"), (False, '"layers.1"')])
def test_a_model_that_was_compiled_before_is_refused(whole, what):
    assert run_ranks(compiled, 1, whole) == [
        f'torch.compile wrapped {what} before compose, so that its parameters are called "_orig_mod.*"; hand compose '
        "the model as it was, and write [scheduling.compile] into the manifest, which compiles its blocks"
    ]


def read_by(how, folder, averages):
    run = composed("[sharding.ddp]\n", model=seeded(Averaged), loss_fn=lambda output, target: output.sum())
    run.averages_buffers = averages
    torch.manual_seed(run.context.rank)
    x = torch.randn(6, 3)
    with run.step(0):
        run.forward_backward(x, target=torch.ones(6))
    own = run.model.norm.running_mean.clone()
    read = {
        "evaluate": lambda: run.evaluate(x, target=torch.ones(6)),
        "save": lambda: run.save(folder / "saved"),
        "full_state_dict": run.full_state_dict,
    }
    read[how]()
    return own, run.model.norm.running_mean.clone()


@pytest.mark.parametrize("how", ["evaluate", "save", "full_state_dict"])
@pytest.mark.parametrize("averages", [True, False])
def test_what_reads_buffers_averages_them_before(how, averages, tmp_path):
    (one, mean_one), (two, mean_two) = run_ranks(read_by, 2, how, tmp_path, averages)
    assert not torch.equal(one, two)
    assert torch.equal(mean_one, mean_two) == averages
    assert torch.allclose(mean_one, (one + two) / 2 if averages else one)
