"""Units of FSDP2 whose output is a view, changed in place afterwards or not: right, and without a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import composer3d
from composer3d import torch_compat
from composer3d.testing import assert_gradients_equal, full, run_ranks

LAYOUTS = ["[sharding.fsdp2]\n", '[sharding.ddp]\nreducer = "unit"\n']


class Block(nn.Module):
    """Returns what a linear layer with a bias makes of three dims: a view."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x_BSD):
        for layer in self.layers:
            y_BSD = layer(x_BSD)
            y_BSD += x_BSD  # in place, on a view that a unit returned
            x_BSD = y_BSD
        return {"found": x_BSD[:, 0], "rest": (x_BSD[:, 1:],)}


def loss_fn(output, target):
    found = output["found"]
    found *= 2.0
    return ((found - target) ** 2).sum() + output["rest"][0].sum(), target.numel()


def step(path):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, reference = Residual(), Residual()
    reference.load_state_dict(model.state_dict())
    x, y = torch.randn(4, 3, 6), torch.randn(4, 6)
    total, count = loss_fn(reference(x), y)
    (total / count).backward()
    run = composer3d.compose(model, path, loss_fn=loss_fn)
    rank = run.context.data_parallel_rank
    with run.step(0):
        run.forward_backward(x[2 * rank : 2 * rank + 2], target=y[2 * rank : 2 * rank + 2])
        run.clip_grad_norm_(float("inf"))
        gradients = {fqn: full(parameter.grad) for fqn, parameter in run.named_parameters()}
    run.close()
    return gradients, {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=["fsdp2", "ddp"])
def test_views_that_are_changed_in_place_keep_their_gradients(layout, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"composer3d = 1\n{layout}")
    for gradients, reference in run_ranks(step, 2, path):
        assert_gradients_equal(gradients, reference, tolerance=1e-12)


def test_an_output_without_a_view_stays_the_object_that_it_is():
    module = nn.Identity()
    torch_compat.keep_output_hooks(module)
    value = {"x": torch.ones(2, requires_grad=True)}
    assert module(value) is value
    weights = torch.ones(2, 3, requires_grad=True)
    view = (2 * weights)[:, 0]
    found = module({"x": view})["x"]
    assert found is not view and found._base is None and found.data_ptr() == view.data_ptr()
    fired = []
    found.register_hook(lambda gradient: fired.append(gradient))
    found *= 3.0
    found.sum().backward()
    assert len(fired) == 1 and weights.grad[:, 0].tolist() == [6.0, 6.0]
