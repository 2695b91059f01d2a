"""State that a loop saves itself: shards of one rank are not saved for the whole model, what every rank has is."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.models import Net, composed, mine, seeded, unpadded
from torch import nn

from composer3d import StepError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"


def saved_files(folder):
    torch.set_default_dtype(torch.float64)
    run = composed(FSDP)
    with pytest.raises(StepError) as caught:
        torch.save({"model": run.model.state_dict()}, folder / "shards.pt")
    state = run.full_state_dict()
    if run.context.rank == 0:
        torch.save(state, folder / "whole.pt")
        model = Net()
        model.load_state_dict(torch.load(folder / "whole.pt"))
        assert all(torch.equal(model.state_dict()[fqn], tensor) for fqn, tensor in seeded().state_dict().items())
    return str(caught.value), len(state)


def test_one_ranks_shards_are_not_saved_for_the_whole_model(tmp_path):
    shards = (
        "torch.save of run.model.state_dict() would write the shards of this rank alone; on all ranks write "
        'run.save("checkpoints/100"), or state = run.full_state_dict(), which the first rank then saves'
    )
    found = run_ranks(saved_files, 2, tmp_path)
    assert found == [(shards, len(seeded().state_dict())), (shards, 0)]


def saved_replicas(text, folder):
    run = composed(text)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    run.forward_backward(tokens, target=targets)
    run.optimizer(torch.optim.SGD, lr=0.1).step()
    twin = copy.deepcopy(run.model)
    whole = run.full_state_dict()
    found = []
    if run.context.rank == 0:
        torch.save([run.model.state_dict(), twin.state_dict()], folder / "whole.pt")
        for state in torch.load(folder / "whole.pt"):
            model = Net()
            model.load_state_dict(state)
            found.append({fqn: torch.equal(tensor, whole[fqn]) for fqn, tensor in model.state_dict().items()})
    run.model.load_state_dict(run.model.state_dict())
    return found, all(isinstance(each, nn.Parameter) for each in run.model.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("more", ["", 'reducer = "bucketed"\n'])
def test_what_every_rank_has_is_saved_as_one_devices(more, tmp_path):
    same = dict.fromkeys(seeded().state_dict(), True)
    assert run_ranks(saved_replicas, 2, f"[sharding.ddp]\n{more}", tmp_path) == [([same, same], True), ([], True)]


def saved_optimizers(layout, folder):
    """Step once with every layout, and save the optimizer's state as on one device."""
    run = composed(layout)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    run.forward_backward(tokens, target=targets)
    optimizer.step()
    path = folder / f"{run.context.rank}.pt"
    try:
        torch.save({"epoch": 1, "optimizer": optimizer.state_dict()}, path)
    except StepError as error:
        optimizer.load_state_dict(optimizer.state_dict())  # in memory it is taken
        return str(error)
    return len(torch.load(path)["optimizer"]["state"])


PIPELINE = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n[train]\nmicrobatch = 2\n'


@pytest.mark.parametrize("layout", [FSDP, FSDP + "zero = 1\n", PIPELINE])
def test_one_ranks_state_of_an_optimizer_is_not_saved_for_all(layout, tmp_path):
    assert set(run_ranks(saved_optimizers, 2, layout, tmp_path)) == {
        "torch.save of optimizer.state_dict() would write the state of this rank's shards alone; on all ranks write "
        'run.save("checkpoints/100"), which holds the model, the optimizer and what run.attach(...) added, and '
        'run.load("checkpoints/100") in any layout'
    }


def test_state_that_every_rank_has_is_saved(tmp_path):
    assert run_ranks(saved_optimizers, 2, "[sharding.ddp]\n", tmp_path) == [len(list(seeded().parameters()))] * 2
    assert run_ranks(saved_optimizers, 1, FSDP, tmp_path) == [len(list(seeded().parameters()))]


def loss_of(run, part):
    """Return the sum over one of two unequal parts of the batch, and what it counts."""
    x, targets = torch.arange(8.0).reshape(4, 2)[part] / 8, torch.ones(4, 2)[part]
    return ((run.model(x) - targets) ** 2).sum(), targets.shape[0]


def accumulating(folder):
    """Save between micro-batches of a step and after it; return how often that warned, and gradients' errors."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.arange(8.0).reshape(4, 2) / 8
    losses = [((model(x) - torch.ones(4, 2)) ** 2).sum() / size for size in (4, 4, 8)]
    expected = [torch.autograd.grad(loss, model.weight)[0] for loss in losses]
    run = composed(FSDP, model)
    optimizer, warned, gradients = run.optimizer(torch.optim.SGD, lr=0.0), [], []
    log = logging.getLogger("composer3d")
    handler = logging.Handler()
    handler.emit = lambda record: warned.append("gradients are not saved" in record.getMessage())
    log.addHandler(handler)

    def save():
        warned.clear()
        run.save(folder / "step-1")
        return sum(warned)

    def own(number):
        run.backward(loss_of(run, slice(3 * number, 3 + number)), last=bool(number))

    def accumulated(number):
        with run.accumulate(2):
            run.backward(loss_of(run, slice(3 * number, 3 + number)))

    def summed(number):
        run.backward(loss_of(run, slice(3 * number, 3 + number))[0] / 8)

    found = []
    for backward in (own, accumulated, summed):
        backward(0)
        between = save()
        backward(1)
        gradients.append(run.full_tensor("weight", run.model.weight.grad).clone())
        optimizer.step()
        optimizer.zero_grad()
        found.append((between, save()))
    with run.step(3):
        run.forward_backward(torch.ones(4, 2), target=torch.ones(4, 2))
        optimizer.step()
        optimizer.zero_grad()
        found.append((None, save()))
    run.close()
    errors = [
        float((one - other).abs().max() / other.abs().max()) for one, other in zip(gradients, expected, strict=True)
    ]
    return found, errors


def test_a_save_between_the_micro_batches_of_a_step_warns(tmp_path):
    ((found, _),) = run_ranks(accumulating, 1, tmp_path)
    assert found == [(1, 0), (1, 0), (1, 0), (None, 0)]


def test_pairs_of_micro_batches_are_weighed_by_their_counts_over_the_whole_accumulation(tmp_path):
    """Of 3 samples and 1 each weighs the same, as in one batch of 4."""
    ((_, errors),) = run_ranks(accumulating, 1, tmp_path)
    assert len(errors) == 3 and max(errors) < 1e-12
