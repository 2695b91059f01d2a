"""Checkpoints of pipelines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.models import composed, mine, padded, seeded

from composer3d.testing import run_ranks


def manifest(schedule="1F1B", pp=2, more=""):
    return f'[mesh]\npp = {pp}\n[scheduling.pipeline]\nschedule = "{schedule}"\n{more}'


def saved(folder, text, options):
    run = composed(text, partial(seeded, **options))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = padded()
    for number in range(3):
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            run.save(f"{folder}/checkpoint")
    loss = float(run.evaluate(mine(run, tokens), target=mine(run, targets)).loss)
    run.close()
    return loss


def resumed(folder, text, options):
    run = composed(text, partial(seeded, **options))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    run.load(f"{folder}/checkpoint")
    tokens, targets = padded()
    with run.step(2):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        optimizer.step()
    loss = float(run.evaluate(mine(run, tokens), target=mine(run, targets)).loss)
    run.close()
    return loss


LAYOUTS = {
    "one": (1, ""),
    "pp2": (2, manifest("1F1B")),
    "v": (2, manifest("ZBVZeroBubble")),
    "dp2": (2, "[sharding.fsdp2]\n"),
    "pp2xdp2": (4, manifest("ZBVZeroBubble") + "[sharding.fsdp2]\n"),
}


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        ("pp2", "one", False),
        ("pp2", "one", True),
        ("pp2", "dp2", True),
        ("v", "one", True),
        ("one", "v", True),
        ("dp2", "pp2", False),
        ("pp2xdp2", "pp2", True),
        ("v", "pp2xdp2", True),
    ],
)
def test_checkpoints_of_one_layout_resume_in_another(tmp_path, before, after, tied):
    options, train = {"num_layers": 4, "tied": tied}, "\n[train]\nmicrobatch = 3\n"
    size, text = LAYOUTS[before]
    losses = run_ranks(saved, size, tmp_path, text + train, options)
    size, text = LAYOUTS[after]
    again = run_ranks(resumed, size, tmp_path, text + train, options)
    assert len(set(losses)) == len(set(again)) == 1
    assert again[0] == pytest.approx(losses[0], rel=2e-6)
