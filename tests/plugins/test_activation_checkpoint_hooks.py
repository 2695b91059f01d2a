"""Activation checkpointing: a recomputation calls the hooks that the block's forward had, and no others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from support.models import write_manifest
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.modules import module as modules

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
D = 8
FSDP = "[sharding.fsdp2]\n"
AC = "[scheduling.activation_checkpoint]\nunits = ['blocks.*']\n"
MODES = {
    "full": "",
    "selective": "mode = 'selective'\n",
    "sqrt": "mode = 'sqrt'\n",
    "budget": "mode = 'budget'\nbudget_fraction = 0.2\n",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)[:, None]
        h = scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]
        return x + self.down(self.up(h).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.hooks, self.seen = nn.ModuleList(Block() for _ in range(3)), "", []

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            for handle in self.register():
                stack.callback(handle.remove)
            for block in self.blocks:
                x = block(x)
            if self.hooks == "later":  # for what comes after this forward
                self.blocks[1].up.register_forward_hook(lambda m, given, output: output * 3)
            return x

    def register(self) -> list[Any]:
        """Register hooks that the forward removes at its end."""
        if self.hooks == "inside":
            block: Any = self.blocks[1]
            return [
                block.norm.register_forward_pre_hook(
                    lambda m, given, named: ((given[0] * 2,), named), with_kwargs=True
                ),
                block.up.register_forward_hook(lambda m, given, named, output: output.sin(), with_kwargs=True),
                block.down.register_forward_hook(
                    lambda m, given, output: self.seen.append(output.detach().square().sum().item())
                ),
            ]
        if self.hooks == "everywhere":
            return [modules.register_module_forward_hook(halved), modules.register_module_forward_pre_hook(doubled)]
        return []


def halved(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
    return output - output.mean(1, keepdim=True) / 2 if isinstance(module, nn.LayerNorm) else None


def doubled(module: nn.Module, given: Any) -> Any:
    return (given[0] * 1.5,) if isinstance(module, nn.Linear) else None


def trained(hooks: list[str], text: str) -> dict[str, float]:
    """Return how far gradients, and what hooks note, are from those of one device that recomputes nothing."""
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(2, 4, 8, D, generator=torch.Generator().manual_seed(1))
    found = {}
    for name in hooks:
        reference, model = _seeded(), _seeded()
        run = composer3d.compose(model, write_manifest(text), loss_fn=mse_loss, example=((x,), {}))
        reference.hooks = model.hooks = name
        reference.seen.clear()
        model.seen.clear()
        mse_loss(reference(x), y).backward()
        with run.step(0):
            run.backward(mse_loss(run.model(x), y))
            pairs = {
                fqn: (run.full_tensor(fqn, p.grad), reference.get_parameter(fqn).grad)
                for fqn, p in run.named_parameters()
            }
        run.close()
        pairs["seen"] = torch.tensor([0.0, *model.seen]), torch.tensor([0.0, *reference.seen])
        assert len(model.seen) == len(reference.seen) == (name == "inside")
        errors = [float((one - other).abs().max() / other.abs().max().clamp(min=1e-9)) for one, other in pairs.values()]
        found[name] = max(errors)
    return found


def _seeded() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_a_forward_removes_are_called_in_its_recomputation(mode: str):
    for found in run_ranks(trained, 1, ["inside", "everywhere", "later"], FSDP + AC + MODES[mode]):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def test_they_are_over_cp():
    text = f"mesh.cp = 2\n{FSDP}[sharding.context_parallel]\n{AC}"
    for found in run_ranks(trained, 2, ["everywhere"], text):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


NOTED: list[float] = []


def note(module: nn.Module, args: Any, output: Tensor) -> None:
    NOTED.append(float(output.detach().sum()))


def noted(text: str) -> list[int]:
    """Return how often hooks of a loop that come in the second step, and go, have noted something after each step."""
    x, y = torch.randn(2, 4, 8, D, generator=torch.Generator().manual_seed(1))
    run, found, handle = (
        composer3d.compose(_seeded(), write_manifest(text), loss_fn=mse_loss, example=((x,), {})),
        [],
        None,
    )
    for step in range(4):
        NOTED.clear()
        if step in (1, 2):
            handle = run.model.get_submodule("blocks.0").register_forward_hook(note)
        with run.step(step):
            run.forward_backward(x, target=y)
        found.append(len(NOTED))
        if handle is not None:
            handle.remove()
    run.close()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_what_hooks_note_that_come_after_a_recomputation_is_noted_once(mode: str):
    assert run_ranks(noted, 1, FSDP + AC + MODES[mode]) == [[0, 1, 1, 0]]
