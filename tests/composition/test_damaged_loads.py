"""A load that fails in its middle: the run holds a part of a checkpoint, and does not go on with it."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
from support.models import Net, composed, mine, padded

from composer3d import CheckpointError, StepError
from composer3d.testing import run_ranks


def damaged(folder):
    """Flip a bit in the middle of the second rank's data."""
    data = sorted(folder.glob("*.distcp"))[-1]
    held = bytearray(data.read_bytes())
    held[len(held) // 2] ^= 1
    data.write_bytes(held)


def trained(path):
    """Return what is said after a load that failed, and the losses of steps after one that succeeds."""
    torch.manual_seed(0)
    run = composed("[sharding.fsdp2]\n", Net())
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())

    def advance(number):
        with run.step(number):
            loss = float(run.forward_backward(tokens, target=targets))
            optimizer.step()
            optimizer.zero_grad()
        return loss

    advance(0)
    run.save(path / "good")
    if run.context.rank == 0:
        shutil.copytree(path / "good", path / "bad")
        damaged(path / "bad")
    dist.barrier()
    expected, found = [advance(1), advance(2)], []
    with pytest.raises(CheckpointError) as caught:
        run.load(path / "bad")
    found.append(str(caught.value))
    calls = (lambda: advance(3), lambda: run.evaluate(tokens, target=targets))
    for refused in (*calls, lambda: run.save(path / "more"), run.full_state_dict):
        with pytest.raises(StepError) as stopped:
            refused()
        found.append(str(stopped.value))
    run.load(path / "good")
    again = [advance(1), advance(2)]
    run.close()
    return found, expected == again


def test_a_run_that_holds_a_part_of_a_checkpoint_goes_no_further_until_a_load_succeeds(tmp_path):
    for said, is_exact in run_ranks(trained, 2, tmp_path):
        assert "what was read before it is loaded: steps and saves are refused until run.load succeeds" in said[0]
        held = f"{tmp_path}/bad failed to load, and the model holds a part of it"
        assert said[1:] == [
            f"{what} is refused: {held}; load a checkpoint that is whole, or compose anew"
            for what in ("a step", "an evaluation", "run.save", "run.full_state_dict")
        ]
        assert is_exact


def test_a_checkpoint_of_another_model_changes_nothing_and_refuses_nothing(tmp_path):
    run = composed("[sharding.fsdp2]\n", Net())
    run.save(tmp_path / "other")
    run.close()
    run = composed("[sharding.fsdp2]\n", Net(dim=32))
    with pytest.raises(CheckpointError):
        run.load(tmp_path / "other")
    run.save(tmp_path / "own")
    run.close()
