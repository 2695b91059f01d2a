"""What a loop changes in a model after compose is refused where data parallelism would pass over it."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import composed, mean_loss, mine, seeded, unpadded, write_manifest

import composer3d
from composer3d import StepError
from composer3d.testing import full, run_ranks

FSDP = "[sharding.fsdp2]\n"


def trained(change, text=FSDP, num_steps=1, before=lambda model: None):
    """Train with a change made before or after the optimizer; return what is said of it."""
    model = seeded()
    before(model)
    run = composed(text, model)
    with pytest.raises(StepError) as caught:
        optimizer = change(run) or run.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(num_steps):
            tokens, targets = (mine(run, tensor) for tensor in unpadded())
            with run.step(number):
                run.backward(mean_loss(run.model(tokens), targets))
                optimizer.step()
                optimizer.zero_grad()
    return str(caught.value)


def put_in_another_head(run):
    run.model.out = torch.nn.Linear(7, 11)


def add_a_parameter(run):
    run.model.layers[1].scale = torch.nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("text", [FSDP, "[sharding.ddp]\n"])
@pytest.mark.parametrize(("change", "name"), [(put_in_another_head, "out.weight"), (add_a_parameter, "layers.1.scale")])
def test_parameters_put_in_after_compose(change, name, text):
    for said in run_ranks(trained, 2, change, text):
        assert said.startswith(f'the parameter "{name}" was put into the model after compose: no plugin has sharded it')


def grown(text):
    """Return what is said to a loop that puts another head in after two steps, and adds it to the optimizer."""
    torch.set_default_dtype(torch.float64)
    run = composed(text, seeded())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(2):
        tokens, targets = (mine(run, tensor) for tensor in unpadded(seed=step))
        run.backward(torch.nn.functional.cross_entropy(run.model(tokens).flatten(0, 1), targets.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    put_in_another_head(run)
    with pytest.raises(StepError) as caught:
        optimizer.add_param_group({"params": list(run.model.out.parameters())})
    return str(caught.value)


@pytest.mark.parametrize("text", [FSDP, "[sharding.ddp]\n"])
def test_parameters_put_in_after_steps(text):
    """They would be taken for the model's own, of which plugins reduce the gradients."""
    for said in run_ranks(grown, 2, text):
        assert said.startswith('the parameter "out.weight" was put into the model after compose')


def freeze(model):
    model.tok.weight.requires_grad_(False)


def unfreeze(run):
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    run.model.tok.weight.requires_grad_(True)
    return optimizer


def test_parameters_that_the_optimizer_was_made_without():
    for said in run_ranks(trained, 2, unfreeze, FSDP, 1, freeze):
        assert said == (
            '"tok.weight" was frozen when the optimizer was made, which does not have it, so that it would stay as it '
            "is; add it by optimizer.add_param_group, let it require gradients before run.optimizer(...), and freeze "
            "it afterwards, or pass run.prepare(...) an optimizer of all parameters, frozen ones too"
        )


def thawed_weights(text):
    """Train four steps; before the third the optimizer is given the parameters that were frozen until then."""
    torch.set_default_dtype(torch.float64)
    model = seeded()
    model.tok.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = composed(text, model)
    model, optimizer = run.prepare(run.model, optimizer)
    for step in range(4):
        if step == 2:
            model.tok.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [model.tok.weight], "lr": 0.01})
        tokens, targets = (mine(run, tensor) for tensor in unpadded(seed=step))
        run.backward(torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: full(parameter) for fqn, parameter in run.named_parameters()}


@pytest.mark.parametrize("text", [FSDP, "[sharding.ddp]\n"])
def test_a_group_that_a_loop_adds_as_it_thaws_parameters_is_trained(text):
    (alone,) = run_ranks(thawed_weights, 1, "")
    for weights in run_ranks(thawed_weights, 2, text):
        assert max(float((weights[fqn] - alone[fqn]).abs().max()) for fqn in alone) < 1e-12
    assert not torch.equal(alone["tok.weight"], seeded().tok.weight.double())


def call_with_others(run):
    tokens, _ = (mine(run, tensor) for tensor in unpadded())
    others = {fqn: parameter.detach() * 2 for fqn, parameter in run.model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(run.model, others, (tokens,))


@pytest.mark.parametrize("text", [FSDP, "[sharding.ddp]\n"])
def test_parameters_passed_for_a_call(text):
    for said in run_ranks(trained, 2, call_with_others, text):
        assert said.startswith('the forward is given a tensor for "tok.weight" (torch.func.functional_call)')


def passed_to_one_unit(text):
    """Pass tensors for the parameters of a model that is one unit; return what is said, and how far a step is off."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, said = torch.nn.Linear(3, 2), torch.randn(4, 3), []
    reference = copy.deepcopy(model)
    run = composer3d.compose(model, write_manifest(text))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    whole = {fqn: value * 2 for fqn, value in reference.state_dict().items()}
    for others in (
        {fqn: parameter * 2 for fqn, parameter in run.model.named_parameters()},
        whole,
        {fqn: torch.nn.Parameter(value) for fqn, value in whole.items()},
    ):
        with pytest.raises(StepError) as caught:
            torch.func.functional_call(run.model, others, (x,))
        said.append(str(caught.value)[:43])
    reference(x).square().mean().backward()
    run.backward(run.model(x).square().mean())
    optimizer.step()
    expected = reference.weight - 0.1 * reference.weight.grad
    error = float((run.full_tensor("weight", run.model.weight) - expected).abs().max().detach())
    run.close()
    return said, error


@pytest.mark.parametrize("text", [FSDP, "[sharding.ddp]\n"])
def test_parameters_passed_for_a_call_of_one_unit_are_refused_and_leave_nothing_behind(text):
    for said, error in run_ranks(passed_to_one_unit, 2, text):
        assert said == ['the forward is given a tensor for "weight" '] * 3 and error < 1e-15
