"""State that a loop saves itself: shards of one rank are not saved for the whole model, what every rank has is."""

from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, mine, seeded, unpadded

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
