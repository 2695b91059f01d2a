"""Backwards of a loop's own, of what it computed from parameters while a forward had gathered them."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import composer3d
from composer3d.errors import StepError
from composer3d.testing import run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "one rank": (1, "[sharding.fsdp2]\n"),
    "ddp": (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    "fsdp2, tp": (4, "[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n"),
}
SAVED = {
    "squares": lambda model: sum((p**2).sum() for p in model.parameters()),
    "a view": lambda model: model[0].weight.T.pow(2).sum(),
    "sums": lambda model: sum(p.sum() for p in model.parameters()),  # save nothing: the gradient would be lost
}

# Beside the loss of the same forward.
BESIDE = {name: lambda model, output, compute=compute: 0.01 * compute(model) for name, compute in SAVED.items()} | {
    "outputs and a weight": lambda model, output: (output @ model[2].weight).square().mean(),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def late(path):
    """Return what each backward after the step's was answered, and the difference of gradients from one device's."""
    torch.set_default_dtype(torch.float64)
    model = make_model()
    single = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    backward, grad = torch.autograd.backward, torch.autograd.grad
    answers = []
    with composer3d.compose(model, path, loss_fn=mse_loss) as run:
        rank, size = run.context.data_parallel_rank, run.context.data_parallel_degree
        own = slice(rank * (8 // size), (rank + 1) * (8 // size))
        for compute in SAVED.values():
            loss = mse_loss(run.model(x[own]), y[own])
            gathered, penalty = list(run.model.parameters()), compute(run.model)
            run.backward(loss)
            for begin in (penalty.backward, lambda a=penalty, b=gathered: torch.autograd.grad(a, b[0])):
                with pytest.raises(StepError) as refusal:
                    begin()
                answers.append(str(refusal.value))
            weight = torch.ones(3, requires_grad=True)
            (weight * 2).sum().backward()  # another graph's
            assert weight.grad.tolist() == [2.0] * 3
            compute(run.model).backward()
            single.zero_grad()
            (mse_loss(single(x), y) + compute(single)).backward()
            expected = dict(single.named_parameters())
            for fqn, parameter in run.named_parameters():
                found = run.full_tensor(fqn, parameter.grad.detach())
                torch.testing.assert_close(found, expected[fqn].grad, rtol=TIGHT, atol=TIGHT)
            run.model.zero_grad()
    assert (torch.autograd.backward, torch.autograd.grad) == (backward, grad)
    return answers


def followed(path, cases):
    """Train two steps by two backwards, of a loss and of what was computed beside it, as one device does."""
    torch.set_default_dtype(torch.float64)
    differences = []
    for compute in map(BESIDE.get, cases):
        model = make_model()
        single = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, single)]
        x, y = torch.randn(8, 6), torch.randn(8, 4)
        with composer3d.compose(model, path) as run:
            wrapped, optimizer = run.prepare(model, optimizers[0])
            rank, size = run.context.data_parallel_rank, run.context.data_parallel_degree
            own = slice(rank * (8 // size), (rank + 1) * (8 // size))
            for _ in range(2):
                for net, begin, part in ((wrapped, run.backward, own), (single, torch.Tensor.backward, slice(8))):
                    output = net(x[part])
                    loss, beside = mse_loss(output, y[part]), compute(net, output)
                    begin(loss, retain_graph=True)
                    begin(beside)
                for each in (optimizer, optimizers[1]):
                    each.step()
                    each.zero_grad()
            expected = dict(single.named_parameters())
            found = {fqn: run.full_tensor(fqn, parameter.detach()) for fqn, parameter in run.named_parameters()}
            differences += [float((found[fqn] - expected[fqn].detach()).abs().max()) for fqn in found]
    return differences


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_second_backward_of_gathered_parameters_gathers_them_again(layout):
    num_ranks, text = LAYOUTS[layout]
    cases = [
        name for name in BESIDE if name in SAVED or "tp" not in layout
    ]  # a DTensor is multiplied by none of a loop
    for differences in run_ranks(followed, num_ranks, write_manifest(text), cases):
        assert differences and max(differences) < TIGHT


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_graph_of_gathered_parameters_that_are_freed_is_refused(layout):
    num_ranks, text = LAYOUTS[layout]
    for answers in run_ranks(late, num_ranks, write_manifest(text)):
        assert len(answers) == 2 * len(SAVED)
        assert all("run.backward(loss + penalty)" in answer and '"0.' in answer for answer in answers)


class Block(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        self.kept = self.weight.pow(2).sum()  # past the unit's outputs, before which its hook gathers
        return output


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(6, 6), nn.ModuleList(Block(6, 6) for _ in range(2)), Block(6, 4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def squares(model):
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def of_the_root(model, backward, loss, output, x):
    penalty = model.first.weight.pow(2).sum()
    backward(loss)
    backward(penalty)


def of_all_beside_a_kept_graph(model, backward, loss, output, x):
    penalty = 1e-2 * output.square().mean() + squares(model)
    backward(loss, retain_graph=True)
    backward(penalty)


def of_a_constant(model, backward, loss, output, x):
    penalty = (model.first(x) @ model.last.weight.detach().T).square().mean()
    backward(loss)
    backward(penalty)


def several_times(model, backward, loss, output, x):
    penalty = model.first.weight.pow(2).sum()
    backward(loss)
    backward(penalty, retain_graph=True)
    with torch.no_grad():
        model(x)
    backward(penalty)


def of_a_block_beside_the_loss(model, backward, loss, output, x):
    backward(loss + model.last.kept + sum(layer.kept for layer in model.layers))


def of_a_block_alone(model, backward, loss, output, x):
    backward(sum(layer.kept for layer in model.layers))
    backward(loss)


FORMS = (
    of_the_root,
    of_all_beside_a_kept_graph,
    of_a_constant,
    several_times,
    of_a_block_beside_the_loss,
    of_a_block_alone,
)
ZERO = "model.blocks = 'layers.*'\n[mesh]\ndp_shard = {}\ndp_replicate = {}\n[sharding.fsdp2]\nzero = {}\n"


def gathered_again(path, forms):
    """Return the largest difference from one device of parameters that were trained in each form."""
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    found = {}
    for form in forms:
        torch.manual_seed(0)
        model = Blocks()
        single = copy.deepcopy(model)
        with composer3d.compose(model, path, loss_fn=mse_loss) as run:
            size = 8 // run.context.data_parallel_degree
            own = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
            ours = run.model, run.backward, run.optimizer(torch.optim.SGD, lr=0.1), x[own], y[own]
            theirs = single, lambda loss, **kept: loss.backward(**kept), torch.optim.SGD(single.parameters(), 0.1), x, y
            for each, backward, optimizer, inputs, targets in (ours, theirs) * 2:
                output = each(inputs)
                form(each, backward, mse_loss(output, targets), output, inputs)
                optimizer.step()
                optimizer.zero_grad()
            expected = dict(single.named_parameters())
            pairs = [(run.full_tensor(fqn, p.detach()), expected[fqn].detach()) for fqn, p in run.named_parameters()]
            found[form.__name__] = max(float((whole - other).abs().max()) for whole, other in pairs)
    return found


@pytest.mark.parametrize(
    ("shards", "replicas", "zero"),
    [(2, 1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1, 1), (2, 1, 2), (2, 2, 3)))],
)
def test_what_a_graph_of_gathered_parameters_needs_is_gathered_again(shards, replicas, zero):
    text = ZERO.format(shards, replicas, zero)
    for found in run_ranks(gathered_again, shards * replicas, write_manifest(text), FORMS):
        assert len(found) == len(FORMS) and max(found.values()) < TIGHT, found


def of_gradients(path):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = Blocks(), torch.randn(8, 6), torch.randn(8, 4)
    single = copy.deepcopy(model)
    with composer3d.compose(model, path, loss_fn=mse_loss) as run:
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        own = slice(run.context.data_parallel_rank * 4, (run.context.data_parallel_rank + 1) * 4)
        loss = mse_loss(run.model(x[own]), y[own])
        kept = sum(layer.kept for layer in run.model.layers)
        found = run.grad(loss + kept, retain_graph=True)
        run.backward(loss)
        late = run.model.last.kept
        optimizer.step()
        with pytest.raises(StepError) as caught:
            run.backward(late)
        theirs = mse_loss(single(x), y) + sum(layer.kept for layer in single.layers)
        expected = torch.autograd.grad(theirs, list(single.parameters()))
        names = [fqn for fqn, _ in single.named_parameters()]
        difference = max(float((found[n] - e).abs().max()) for n, e in zip(names, expected, strict=True))
    return difference, str(caught.value)


def test_gradients_of_a_loops_own_are_gathered_for_and_old_values_are_refused():
    for difference, said in run_ranks(of_gradients, 2, write_manifest(ZERO.format(2, 1, 3))):
        assert difference < TIGHT
        assert said.startswith('a backward begins from a graph of "last.weight" as a forward had gathered it, and the ')


class Routed(Block):
    def forward(self, x):
        output = super().forward(x)
        self.kept = output.logsumexp(-1).square().mean()
        return output


def of_a_kept_term(path):
    """Return the largest difference from one device of gradients of a padded loss and a mean that blocks keep."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(8, 6)
    model.layers = nn.ModuleList(Routed(6, 6) for _ in range(2))
    targets = torch.tensor([-100, 0, 1, -100, 2, 3, 1, 0])
    single = copy.deepcopy(model)

    def loss_of(net, part):
        output = net(x[part])
        return cross_entropy(output, targets[part]) + 0.01 * sum(layer.kept for layer in net.layers)

    with composer3d.compose(model, path) as run:
        size = 8 // run.context.data_parallel_degree
        run.backward(loss_of(run.model, own(run, size)))
        loss_of(single, slice(8)).backward()
        expected = dict(single.named_parameters())
        return max(
            float((run.full_tensor(fqn, p.grad.detach()) - expected[fqn].grad).abs().max())
            for fqn, p in run.named_parameters()
        )


def own(run, size):
    return slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)


def test_a_mean_that_blocks_keep_beside_a_padded_loss_is_one_devices():
    assert max(run_ranks(of_a_kept_term, 2, write_manifest(ZERO.format(2, 1, 3)))) < TIGHT
