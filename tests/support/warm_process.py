"""What a first composition and its first step initialise in a process, done once, so that forked ranks inherit it.

A rank that is forked from a process without it spends 50 to 100 ms on it: torch's tables of overridable functions, the
propagation of sharded operators, and copies of the pages in which all of that lies.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import fake_world

__all__ = ["compose_once"]

LAYOUTS = (
    "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n",
    "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n",
    "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
)


class Block(nn.Module):
    """A normalised pair of linear layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def compose_once() -> None:
    """Train a small model for a step in each of a few layouts, on one rank of a world whose others do not exist."""
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder, fake_world(2):
            manifest = Path(folder) / "run.toml"
            manifest.write_text(f"composer3d = 1\n{layout}")
            run = composer3d.compose(lambda: nn.Sequential(Block(), Block()), manifest, loss_fn=mse_loss, device="cpu")
            optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
            with run.step(0):
                run.forward_backward(torch.ones(2, 4), target=torch.ones(2, 4))
                run.clip_grad_norm_(1.0)
                optimizer.step()
            run.close()
