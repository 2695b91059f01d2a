"""Context parallelism: functions with a backward of their own are refused where a forward applies them, by line."""

from __future__ import annotations

import pytest
import torch
from support.models import mine, write_manifest
from support.root_hooks import Model, loss_of
from torch import Tensor

import composer3d
from composer3d.errors import ComposerError
from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "mesh.cp = 2\n[sharding.context_parallel]\n[sharding.fsdp2]\n"


class Reversed(torch.autograd.Function):
    """Sends a gradient's other direction back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Applying(Model):
    """Names the function in a method that nobody calls, and applies it where a switch is on."""

    def __init__(self, switch: str = "off") -> None:
        super().__init__()
        self.switch = switch

    def never(self, x: Tensor) -> Tensor:
        """Apply it."""
        return Reversed.apply(x)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.body(idx)
        return self.head(Reversed.apply(x) if self.switch == "on" else x)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, 11, (4, 8), generator=generator) for _ in range(2))
    return x, y


def steps() -> tuple[float, str, bool]:
    """Return how far gradients are from one device's, and what is said where the switch is on in the second step."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x, y = data()
    reference, model, said = Applying(), Applying(), ""
    model.load_state_dict(reference.state_dict())
    total, count = loss_of(reference(x), y)
    (total / count).backward()
    run = composer3d.compose(model, write_manifest(FSDP), loss_fn=loss_of, example=((x,), {}))
    with run.step(0):
        run.forward_backward(mine(run, x), target=mine(run, y))
        own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
    run.model.switch = "on"
    try:
        with run.step(1):
            run.forward_backward(mine(run, x), target=mine(run, y))
    except ComposerError as error:
        said = str(error)
    run.close()
    wanted = {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
    top = max(float(each.abs().max()) for each in wanted.values())
    error_of_largest = max(float((own[fqn] - wanted[fqn]).abs().max()) / top for fqn in own)
    return error_of_largest, said, "apply" in vars(Reversed)


def test_functions_that_no_forward_applies_are_no_reason_to_refuse_until_one_does():
    for error, said, is_left in run_ranks(steps, 2):
        assert error < TIGHT
        assert (
            "context_parallel: the model's own code applies Reversed (test_context_parallel_applied_functions" in said
        )
        assert "), a torch.autograd.Function: which positions its backward reads cannot be seen" in said
        assert not is_left


def test_one_that_the_forward_applies_is_refused_before_the_run_with_its_line():
    def composed() -> None:
        composer3d.compose(Applying("on"), write_manifest(FSDP), loss_fn=loss_of, example=((data()[0],), {}))

    with pytest.raises(ComposerError) as caught:
        run_ranks(composed, 2)
    assert "the model's own code applies Reversed (test_context_parallel_applied_functions.py:" in str(caught.value)
    assert "cannot be seen; write it with operators" in str(caught.value)
    assert "apply" not in vars(Reversed)
