"""Lightning Fabric under a manifest, beside a loop of plain torch."""

from __future__ import annotations

import os
import re

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from composer3d import StepError
from composer3d.testing import run_ranks

pytest.importorskip("lightning_fabric", reason="the extra `lightning` is not installed")
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "ddp": "[sharding.ddp]\n",
    "tp": '[mesh]\ntp = 2\n[sharding.tensor_parallel]\nplan = {"layers.*.0" = "colwise", "layers.*.2" = "rowwise"}\n',
}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def parts():
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(16, 6, generator=generator), torch.randint(0, 5, (16,), generator=generator))
    return model, optimizer, scheduler, data


def alone(folder):
    torch.set_default_dtype(torch.float64)
    model, optimizer, scheduler, data = parts()
    losses = []
    for _ in range(3):
        for number, (x, y) in enumerate(DataLoader(data, batch_size=4)):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if number % 2:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(norm.item())
        scheduler.step()
    with torch.no_grad():
        return [*losses, F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()]


def with_fabric(manifest, folder, stop):
    """Train, saved and resumed by another Fabric after the first epoch; return norms and the last loss."""
    from lightning_fabric import Fabric

    from composer3d.integrations.lightning import Composer3DStrategy

    torch.set_default_dtype(torch.float64)
    rank = torch.distributed.get_rank()
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    world |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in world.items()})
    losses, state = [], {"epoch": 0}
    for epochs in ((0, 1), (1, 3)) if stop else ((0, 3),):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=Composer3DStrategy(write_manifest(manifest)))
        fabric.launch()
        model, optimizer, scheduler, data = parts()
        with pytest.raises(StepError, match=re.escape("fabric.setup_dataloaders was called before fabric.setup(")):
            fabric.setup_dataloaders(DataLoader(data, batch_size=2))
        model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
        size = 4 // fabric.strategy.run.context.num_readers
        loader = fabric.setup_dataloaders(DataLoader(data, batch_size=size))
        state |= {"model": model, "optimizer": optimizer}
        if epochs[0]:
            state["epoch"] = 0
            assert fabric.load(folder / "first", state) == {} and state["epoch"] == 1
        for epoch in range(*epochs):
            for number, (x, y) in enumerate(loader):
                with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                    fabric.backward(F.cross_entropy(model(x), y) / 2)
                if number % 2:
                    losses.append(fabric.clip_gradients(model, optimizer, max_norm=0.3).item())
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
            if epoch == 0:
                state["epoch"] = 1
                fabric.save(folder / "first", state)
    with torch.no_grad():
        return [*losses, F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()]


@pytest.mark.parametrize("stop", [False, True], ids=["", "resumed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_and_losses_are_those_of_one_device(layout, stop, tmp_path):
    (wanted,) = run_ranks(alone, 1, tmp_path)
    for found in run_ranks(with_fabric, 2, LAYOUTS[layout], tmp_path, stop):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-12
