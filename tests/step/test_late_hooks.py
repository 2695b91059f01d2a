"""Hooks of the whole model, on its output and on what a loop keeps, and retained gradients, are one device's."""

from __future__ import annotations

import pytest
import torch
from support.late_hooks import INSIDE, PREPARED, errors
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
LAYOUTS = {"fsdp2": "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n", "ddp": "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_from_the_first_step_on_in_a_loop_and_in_the_engine(layout: str):
    for found in run_ranks(errors, 2, list(PREPARED), LAYOUTS[layout]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def late(text: str) -> dict[str, float]:
    return errors(["before the model", "after the model", "its output"], text, late=True)


def test_they_are_where_they_are_registered_on_the_composed_model():
    for found in run_ranks(late, 2, LAYOUTS["fsdp2"]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def at_the_fifth_step(own: bool) -> list[float]:
    """Return what a hook on the output is given that is registered first after four steps, of which none had hooks."""
    torch.set_default_dtype(torch.float64)
    seen: list[torch.Tensor] = []
    x, y = torch.ones(2, 3, 4), torch.zeros(2, 3, 5)
    steps = [0]

    def loss(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if steps[0] == 4:
            o.register_hook(seen.append)
        return (o - t).mean()

    run = composer3d.compose(nn.Sequential(nn.Linear(4, 5)), write_manifest(LAYOUTS["fsdp2"]), loss_fn=loss)
    for steps[0] in range(5):
        with run.step(steps[0]):
            if own:
                run.backward(loss(run.model(x), y))
            else:
                run.forward_backward(x, target=y)
    run.close()
    return [float(each.max()) for each in seen]


@pytest.mark.parametrize("own", [False, True], ids=["engine", "loop"])
def test_hooks_on_outputs_are_seen_whenever_they_are_registered(own: bool):
    for found in run_ranks(at_the_fifth_step, 2, own):
        assert found == pytest.approx([1 / 60], rel=TIGHT)


def after_steps_without(text: str) -> dict[str, float]:
    return errors(list(INSIDE), text, after=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_inside_are_seen_whenever_they_are_registered(layout: str):
    for found in run_ranks(after_steps_without, 2, LAYOUTS[layout]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}
