"""States that objects of a loop or of plugins keep: those of all stages, and numbers that JSON has no word for."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.models import Even, composed, seeded

from composer3d.testing import full, run_ranks

PIPELINE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"


def plateau(path):
    """Save and load schedulers whose state holds infinities and nested lists."""
    found = []
    for _ in range(2):
        run = composed("", seeded())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        run.attach("plateau", scheduler)
        if found:
            run.load(path)
        else:
            scheduler.best, scheduler.num_bad_epochs = math.inf, 4
            run.save(path)
        found.append(scheduler.state_dict())
    return found


def test_infinities_come_back(tmp_path):
    one, other = run_ranks(plateau, 1, tmp_path / "a")[0]
    assert one == other
    assert one["best"] == math.inf and one["num_bad_epochs"] == 4


class Averages:
    """State of a loop by FQN: on every stage of a pipeline that of other parameters."""

    def __init__(self, run, value=0.0):
        self.held = {name: torch.full_like(p, value).detach() for name, p in run.named_parameters()}

    def state_dict(self):
        return {"averages": dict(self.held), "steps": 3}

    def load_state_dict(self, state):
        for name, tensor in self.held.items():
            tensor.copy_(state["averages"][name])


def stages(text, path, *, saves):
    run = composed(text, seeded(Even))
    averages = Averages(run)
    if saves:
        for number, (_, tensor) in enumerate(sorted(averages.held.items())):
            tensor.fill_(float(number + 100 * run.coordinates["pp"]))
    run.attach("averages", averages)
    if saves:
        run.save(path)
    else:
        run.load(path)
    found = {name: full(tensor).clone() for name, tensor in averages.held.items()}
    run.close()
    return found


@pytest.mark.parametrize(("text", "world_size"), [(PIPELINE, 2), ("", 1)], ids=["stages", "one device"])
def test_states_of_all_stages_come_back(text, world_size, tmp_path):
    """The checkpoint's JSON is that of the first rank, which has other parameters than the second."""
    saved = {
        k: v
        for found in run_ranks(partial(stages, saves=True), 2, PIPELINE, tmp_path / "saved")
        for k, v in found.items()
    }
    for found in run_ranks(partial(stages, saves=False), world_size, text, tmp_path / "saved"):
        assert found
        assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())
