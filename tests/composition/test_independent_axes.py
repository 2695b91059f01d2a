"""Axes along which ranks train models of their own: other samples, the same contract within each, state of each."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, full, gradient_error, padded, reference_gradients, seeded

from composer3d.testing import run_ranks

ISLANDS = '[communication.islands]\nuse = "third_party.island_plugins:Islands"\n'
LAYOUTS = [
    ("[mesh]\nisland = 2\n[sharding.fsdp2]\n", 4),
    ("[mesh]\nisland = 2\ndp_replicate = 1\n[sharding.ddp]\n", 2),
    ("[mesh]\nisland = 2\n", 2),
]


def own(run, tensor):
    """Return what this rank reads: other samples on each island."""
    return tensor.chunk(run.context.num_readers)[run.context.reader]


def trained(path, text):
    """Return the distance from one device on the island's samples, and parameters before and after averages."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded(num_sequences=8)
    run = composed(text)
    island = run.coordinates["island"]
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    rows = slice(4 * island, 4 * island + 4)
    loss_1, gradients = reference_gradients(seeded(), tokens[rows], targets[rows])
    held, errors = [], []
    for number in range(2):
        with run.step(number):
            loss = run.forward_backward(own(run, tokens), target=own(run, targets))
            errors.append(max(gradient_error(run, gradients), float((loss - loss_1).abs())))
            optimizer.step()
            optimizer.zero_grad()
        held.append(torch.cat([full(p.detach()).flatten() for _, p in run.named_parameters()]))
        if number == 0:
            run.save(path)
    run.load(path)
    held.append(torch.cat([full(p.detach()).flatten() for _, p in run.named_parameters()]))
    run.close()
    return island, errors[0], held


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_each_model_is_that_of_one_device_on_its_samples(layout, world_size, tmp_path):
    found = run_ranks(trained, world_size, tmp_path / "saved", layout + ISLANDS)
    first = {island: held for island, _, held in found}
    assert first.keys() == {0, 1}
    assert max(error for _, error, _ in found) < 1e-12
    apart, averaged, loaded = zip(*first.values(), strict=True)
    assert float((apart[0] - apart[1]).abs().max()) > 1e-3
    assert averaged[0].equal(averaged[1])
    assert all(one.equal(other) for one, other in zip(loaded, apart, strict=True))  # the state of each is saved
    assert all(held[1].equal(averaged[0]) for _, _, held in found)


def loaded(path, text):
    torch.set_default_dtype(torch.float64)
    run = composed(text)
    if not path.exists():
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        with run.step(0):
            tokens, targets = (own(run, tensor) for tensor in padded(num_sequences=8))
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        run.save(path)
    else:
        run.load(path)
    held = torch.cat([full(p.detach()).flatten() for _, p in run.named_parameters()])
    run.close()
    return held


def test_another_number_of_models_begins_from_the_first(tmp_path):
    saved = run_ranks(loaded, 2, tmp_path / "saved", "[mesh]\nisland = 2\n" + ISLANDS)
    (alone,) = run_ranks(loaded, 1, tmp_path / "saved", ISLANDS)
    more = run_ranks(loaded, 3, tmp_path / "saved", "[mesh]\nisland = 3\n" + ISLANDS)
    assert alone.equal(saved[0]) and not saved[0].equal(saved[1])
    assert [held.equal(other) for held, other in zip(more, [saved[0], saved[1], saved[0]], strict=True)] == [True] * 3
