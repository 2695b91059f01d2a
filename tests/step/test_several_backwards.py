"""Gradients of gradients in loops of one's own: penalties, forces, adversarial examples, curvature."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYOUTS = {
    "zero 3": "[sharding.fsdp2]\n",
    "zero 2": "[sharding.fsdp2]\nzero = 2\n",
    "zero 1": "[sharding.fsdp2]\nzero = 1\n",
    "reshard_root": "[sharding.fsdp2]\nreshard_root = true\n",
    "unit": "[sharding.ddp]\n[mesh]\ndp_replicate = 2\n",
    "bucketed": '[sharding.ddp]\nreducer = "bucketed"\n[mesh]\ndp_replicate = 2\n',
}


class Critic(nn.Module):
    """Blocks that are units, between layers of the root."""

    def __init__(self, width=8):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(3)
        )

    def forward(self, x):
        h = self.enter(x).tanh()
        for layer in self.layers:
            h = h + layer(h)
        return self.leave(h)


class Forces(Critic):
    """The energy of points, and the force on each, which the forward itself differentiates for."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        energy = super().forward(x)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -gradient


def slope(model, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient


def penalty(model, x):
    return (slope(model, x).norm(dim=1) - 1).pow(2).mean()


def penalty_last(model, x):
    """WGAN-GP's critic, whose penalty is computed after its outputs."""
    return model(x).mean() - model(2 * x).mean() + 10 * penalty(model, 1.5 * x)


def penalty_first(model, x):
    """The same, in which units are gathered for other forwards after the one that the penalty is of."""
    punished = penalty(model, 1.5 * x)
    with torch.no_grad():
        model(x)
    return model(x).mean() - model(2 * x).mean() + 10 * punished


def forces(model, x):
    energy, force = model(x)
    return energy.pow(2).mean() + (force - x).pow(2).mean()


def adversarial(model, x):
    """The loss of inputs moved along a gradient that nobody differentiates."""
    moved = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(moved).pow(2).mean(), moved)
    return model(x + gradient.sign()).pow(2).mean()


def curvature(model, x):
    """A power iteration on the graph of a gradient, which is used several times before the backward."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    direction = torch.ones_like(x)
    for _ in range(2):
        (direction,) = torch.autograd.grad((gradient * direction).sum(), x, retain_graph=True)
        direction = direction / direction.norm(dim=1, keepdim=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), x, create_graph=True)
    return product.pow(2).mean()


LOSSES = {each.__name__: each for each in (penalty, penalty_last, penalty_first, forces, adversarial, curvature)}


def make_both(run, reference):
    return run.optimizer(torch.optim.SGD, lr=0.05), torch.optim.SGD(reference.parameters(), lr=0.05)


def error_of(gradients, reference):
    """Return how far gradients are from one device's; infinite where only one of both has one."""
    expected = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    assert {fqn for fqn in gradients if gradients[fqn] is None} == {fqn for fqn in expected if expected[fqn] is None}
    there = [fqn for fqn in gradients if gradients[fqn] is not None]
    return max(float((gradients[fqn] - expected[fqn]).abs().max()) for fqn in there) / largest


def errors(path, name, num_microbatches=1):
    """Return the errors of two steps' gradients."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, loss_of = (Forces if name == "forces" else Critic)(), LOSSES[name]
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, path)
    optimizer, other = make_both(run, reference)
    rank, found = run.context.data_parallel_rank, []
    for number in range(2):
        for batch in torch.randn(num_microbatches, 8, 5, generator=torch.Generator().manual_seed(number)):
            (loss_of(reference, batch) / num_microbatches).backward()
            with run.accumulate(num_microbatches):
                run.backward(loss_of(run.model, batch[4 * rank : 4 * rank + 4]))
                gradients = {fqn: None if p.grad is None else full(p.grad) for fqn, p in run.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
        found.append(error_of(gradients, reference))
        other.step()
        other.zero_grad()
    run.close()
    return found


def all_errors(path, names):
    return {name: errors(path, name) for name in names}


# torch's DistributedDataParallel waits for parameters of which a penalty alone depends on none, as the last bias, and
# warns of a gradient's strides.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_gradients_are_those_of_one_device(layout):
    names = ["penalty_last", "penalty_first", "adversarial"] if layout == "bucketed" else list(LOSSES)
    for found in run_ranks(all_errors, 2, write_manifest(LAYOUTS[layout]), names):
        assert max(error for each in found.values() for error in each) <= TIGHT, found


@pytest.mark.parametrize("layout", ["zero 3", "zero 2", "unit"])
def test_penalties_in_several_microbatches(layout):
    for found in run_ranks(errors, 2, write_manifest(LAYOUTS[layout]), "penalty_first", 2):
        assert max(found) <= TIGHT, found


def stale(path):
    """Return the error of a step after an evaluation that differentiates twice, and leaves everything gathered."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Critic()
    reference, x = copy.deepcopy(model), torch.randn(8, 5)
    run = composer3d.compose(model, path)
    optimizer, other = make_both(run, reference)
    rank = run.context.data_parallel_rank
    for _ in range(2):
        slope(run.model, x)
        with torch.no_grad():
            run.model(x)
        slope(run.model, x)
        run.backward(penalty_last(run.model, x[4 * rank : 4 * rank + 4]))
        slope(run.model, x)
        optimizer.step()
        optimizer.zero_grad()
        penalty_last(reference, x).backward()
        other.step()
        other.zero_grad()
    with torch.no_grad():
        error = float((run.model(x) - reference(x)).abs().max())
    run.close()
    return error


@pytest.mark.parametrize("layout", ["zero 3", "zero 2", "unit"])
def test_what_evaluations_keep_gathered_is_not_read_after_the_optimizer(layout):
    assert max(run_ranks(stale, 2, write_manifest(LAYOUTS[layout]))) <= TIGHT


def refused(path, name):
    """Return the errors of composing a model, or of its first loss."""
    x = torch.randn(4, 5)
    try:
        with composer3d.compose(Forces() if name == "forces" else Critic(), path, example=((x,), {})) as run:
            LOSSES[name](run.model, x)
    except composer3d.ComposerError as error:
        return str(error)
    return ""


def test_what_tensor_parallelism_exchanges_is_not_differentiated_twice():
    manifest = write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n")
    advice = "write 1 for it, and shard parameters over dp_shard, whose gradients can be differentiated"
    (message,) = set(run_ranks(refused, 2, manifest, "penalty"))
    assert message == (
        "a gradient with create_graph=True of the model's output cannot be differentiated over tp: what its ranks "
        f"exchange in a backward is in no graph, and gradients would be wrong; in [mesh], {advice}"
    )
    (message,) = set(run_ranks(refused, 2, manifest, "forces"))
    line = Forces.forward.__code__.co_firstlineno
    assert message == (
        f"{manifest}:3:1: [mesh] forward of the model (Forces, test_several_backwards.py:{line}) differentiates with "
        f"create_graph, and what ranks of tp exchange in a backward is in no graph: gradients would be wrong; {advice}"
    )


def test_buckets_refuse_a_penalty_of_which_some_parameter_is_no_part():
    with pytest.raises(composer3d.RankError) as caught:
        run_ranks(errors, 2, write_manifest(LAYOUTS["bucketed"]), "penalty")
    assert (
        'StepError: no gradient reached "leave.bias" in step 0, and torch\'s DistributedDataParallel waits for one of '
        "every parameter before it reduces any; in [sharding.ddp] write find_unused_parameters = true for parameters "
        'that the forward leaves out, and reducer = "unit" for those that a penalty, a gradient of the output, does '
        "not depend on"
    ) in str(caught.value)


def shared_graph(text, form):
    """Return the largest error of two steps whose two losses go through one graph.

    Their gradients are summed, or the first one's discarded, or the loop puts both together itself.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Critic()
    reference, x = copy.deepcopy(model), torch.randn(4, 5)
    run = composer3d.compose(model, write_manifest(text))
    optimizer, plain = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    rank, errors = run.context.data_parallel_rank, []
    for _ in range(2):
        output = reference(x)
        (output.pow(2).mean() + {"summed": 1, "discarded": 0, "combined": -2}[form] * output.mean()).backward()
        output = run.model(x[2 * rank : 2 * rank + 2])
        run.backward(output.mean(), retain_graph=True)
        first = {fqn: p.grad.clone() for fqn, p in run.named_parameters()}
        if form != "summed":
            optimizer.zero_grad()
        run.backward(output.pow(2).mean())
        for fqn, p in run.named_parameters() if form == "combined" else ():
            p.grad = p.grad - 2 * first[fqn]
        errors.append(error_of({fqn: full(p.grad) for fqn, p in run.named_parameters()}, reference))
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    return max(errors)


@pytest.mark.parametrize("form", ["summed", "discarded", "combined"])
@pytest.mark.parametrize("layout", ["zero 3", "zero 1", "unit", "bucketed"])
def test_two_backwards_go_through_one_graph(layout, form):
    assert max(run_ranks(shared_graph, 2, LAYOUTS[layout], form)) < TIGHT


def later_backwards(text, order, last):
    """Return the errors of steps with two forwards before their backwards, in an order."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Critic()
    reference, xs = copy.deepcopy(model), torch.randn(2, 4, 5)
    run = composer3d.compose(model, write_manifest(text))
    optimizer, plain = run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    rows = slice(2 * run.context.data_parallel_rank, 2 * run.context.data_parallel_rank + 2)
    errors = []
    for _ in range(3):
        sum(reference(x).pow(2).mean() for x in xs).div(2 if last else 1).backward()
        losses = [run.model(x[rows]).pow(2).mean() for x in xs]
        for position, index in enumerate(order):
            run.backward(losses[index], **({"last": position == 1} if last else {}))
        errors.append(error_of({fqn: full(p.grad) for fqn, p in run.named_parameters()}, reference))
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    run.close()
    return max(errors)


@pytest.mark.parametrize("last", [False, True], ids=["losses", "parts"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("layout", ["zero 3", "unit", "bucketed", "static", "views"])
def test_backwards_may_follow_all_forwards(layout, order, last):
    more = {"static": "static_graph = true\n", "views": "gradient_as_bucket_view = true\n"}
    bucketed = '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'
    text = bucketed + more[layout] if layout in more else LAYOUTS[layout]
    assert max(run_ranks(later_backwards, 2, text, order, last)) < TIGHT


def replaced():
    """Return what is said of two backwards where a codec reduces."""
    manifest = LAYOUTS["bucketed"] + '[communication.compression]\ngradients = "powersgd"\n'
    run = composer3d.compose(Critic(), write_manifest(manifest))
    losses = [run.model(torch.ones(2, 5)).pow(2).mean() for _ in range(2)]
    run.backward(losses[0])
    with pytest.raises(composer3d.StepError) as caught:
        run.backward(losses[1])
    return str(caught.value)


def test_backwards_that_follow_all_forwards_are_refused_where_a_codec_reduces():
    for message in run_ranks(replaced, 2):
        assert message.startswith("two backwards without a forward between them: torch's DistributedDataParallel")
