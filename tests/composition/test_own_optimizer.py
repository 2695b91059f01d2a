"""An optimizer that a loop makes itself over a composition's parameters."""

from __future__ import annotations

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import run_ranks


def stepped():
    """Step with an optimizer of the loop's own; return what is said, and whether a weight has changed."""
    model, other = nn.Linear(3, 2), nn.Linear(2, 2)
    run = composer3d.compose(model, write_manifest("[sharding.fsdp2]\n"))
    mine, elsewhere = torch.optim.AdamW(run.model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.backward(mse_loss(run.model(torch.randn(4, 3)), torch.randn(4, 2)))
    elsewhere.step()
    with pytest.raises(composer3d.StepError) as caught:
        mine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    run.close()
    mine.step()  # the composition is over
    return str(caught.value), same


def test_its_first_step_is_refused_with_the_line_to_write():
    assert run_ranks(stepped, 1) == [
        (
            "AdamW.step() was called in step 0 on parameters of the composition, which has not made that optimizer: "
            "its gradients are not final, and no step ends; write optimizer = run.optimizer(torch.optim.AdamW, ...) "
            "instead of AdamW(run.model.parameters(), ...)",
            True,
        )
    ]
