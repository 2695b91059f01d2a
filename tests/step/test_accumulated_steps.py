"""Accumulation as Accelerate's loops write it, compared with one device that adds up by itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, mine, seeded, unpadded
from torch.utils.data import DataLoader, TensorDataset

from composer3d import StepError
from composer3d.testing import count_collectives, full, run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"
LAYOUTS = [FSDP, FSDP + "zero = 1\n", "[sharding.ddp]\n", '[sharding.ddp]\nreducer = "bucketed"\n']
EPOCHS, NUM_BATCHES = 2, 7
MESSAGE = (
    "the learning rate changed between the micro-batches of a step; write "
    'run.attach("lr_scheduler", lr_scheduler) once, and its step waits for the optimizer\'s, or '
    "if run.sync_gradients: lr_scheduler.step()"
)


def data():
    return TensorDataset(*unpadded(num_sequences=4 * NUM_BATCHES))


def mean(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def one_device(num):
    """Divide the batches of an epoch into groups, the last one as it is, and step on the mean of each."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    norms = []
    for _ in range(EPOCHS):
        batches = list(DataLoader(data(), batch_size=4))
        for first in range(0, NUM_BATCHES, num):
            group = batches[first : first + num]
            (sum(mean(model, *batch) for batch in group) / len(group)).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, norms


def accelerated(layout, num):
    """Train in the lines of an Accelerate script; return the distance from one device, norms, steps and collectives."""
    torch.set_default_dtype(torch.float64)
    run = composed(layout)
    model, optimizer = run.model, run.optimizer(torch.optim.AdamW, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    run.attach("lr_scheduler", scheduler)
    loader = run.loader(DataLoader(data(), batch_size=4))
    completed, norms, reductions = 0, [], []
    for _ in range(EPOCHS):
        for tokens, targets in loader:
            with run.accumulate(num), count_collectives(run.mesh) as collectives:
                run.backward(mean(model, tokens, targets))
                norms.append(float(run.clip_grad_norm_(0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            reductions.append(collectives.count("reduce_scatter"))
            if run.sync_gradients:
                completed += 1
        with torch.no_grad():
            model(tokens)
    reference, expected = one_device(num)
    difference = max(
        float((full(parameter.detach()) - reference.get_parameter(fqn).detach()).abs().max())
        for fqn, parameter in run.named_parameters()
    )
    run.close()
    return difference, norms, expected, completed, reductions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num", [1, 3, 5])
def test_groups_are_the_steps_of_one_device(layout, num):
    groups = math.ceil(NUM_BATCHES / num)
    for difference, norms, expected, completed, reductions in run_ranks(accelerated, 2, layout, num):
        assert difference < TIGHT and completed == EPOCHS * groups
        lasts = [index % NUM_BATCHES in (NUM_BATCHES - 1, *range(num - 1, NUM_BATCHES, num)) for index in range(14)]
        assert [not math.isnan(norm) for norm in norms] == lasts
        found = [norm for norm in norms if not math.isnan(norm)]
        assert found == pytest.approx(expected, rel=TIGHT, abs=0)
        if "fsdp2" in layout:  # ZeRO-3 keeps no gradient whole, ZeRO-1 reduces after the last
            assert [bool(count) for count in reductions] == (lasts if "zero = 1" in layout else [True] * 14)


def gradients_of(layout, num_microbatches, last):
    """Return the largest relative distance of a group's gradients from one device's."""
    torch.set_default_dtype(torch.float64)
    run, model = composed(layout), seeded()
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for number, (tokens, targets) in enumerate(list(DataLoader(data(), batch_size=4))[:num_microbatches]):
        (mean(model, tokens, targets) / num_microbatches).backward()
        with run.accumulate(5, last=last and number == num_microbatches - 1):
            run.backward(mean(run.model, mine(run, tokens), mine(run, targets)))
            if run.sync_gradients:
                run.clip_grad_norm_(math.inf)
                found = {fqn: full(parameter.grad) for fqn, parameter in run.named_parameters()}
            optimizer.step()
    run.close()
    expected = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
    return max(float((found[fqn] - own).abs().max() / own.abs().max()) for fqn, own in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_microbatches", "last"), [(5, False), (3, True)])
def test_gradients_are_those_of_one_device(layout, num_microbatches, last):
    assert max(run_ranks(gradients_of, 2, layout, num_microbatches, last)) < TIGHT


def pipelined(num):
    """Accumulate over what a pipeline runs by itself; return the gradients' norm, and that of one device."""
    torch.set_default_dtype(torch.float64)
    model = seeded()
    text = "[mesh]\npp = 2\n[train]\nmicrobatch = 1\n[sharding.fsdp2]\n[scheduling.pipeline]\n"
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for tokens, targets in list(DataLoader(data(), batch_size=4))[:num]:
        with run.accumulate(num):
            (mean(model, tokens, targets) / num).backward()
            run.forward_backward(tokens, target=targets)
            norm = run.clip_grad_norm_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return float(norm), float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))


def test_batches_of_a_pipeline_are_accumulated():
    for norm, expected in run_ranks(pipelined, 2, 3):
        assert norm == pytest.approx(expected, rel=TIGHT, abs=0)


def mistakes():
    """Return what is said of a scheduler that nobody knows, of a step around a group, and of micro-batches left."""
    import logging

    said, logged = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("composer3d.step.loops.accumulated_steps").addHandler(handler)
    run = composed(FSDP)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    with pytest.raises(StepError) as caught:
        for _ in range(2):
            with run.accumulate(2):
                run.backward(mean(run.model, tokens, targets))
                optimizer.step()
                scheduler.step()
    said.append(str(caught.value))
    run._engine.own_steps.abandon()
    with pytest.raises(StepError) as caught, run.step(3), run.accumulate(2):
        pass
    said.append(str(caught.value))
    with pytest.raises(StepError) as caught, run.accumulate(0):
        pass
    said.append(str(caught.value))
    run.close()
    return said, logged


def test_mistakes_say_what_to_write():
    ((said, logged),) = run_ranks(mistakes, 1)
    inside = "run.accumulate(...) was called inside run.step(...), whose micro-batches are its own"
    assert said == [MESSAGE, inside, "run.accumulate(0): a step has at least one micro-batch"]
    assert len(logged) == 1 and logged[0].startswith("the gradients of 1 micro-batches were not used")
