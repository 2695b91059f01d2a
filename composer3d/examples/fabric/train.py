"""A loop with Lightning Fabric: loaders, accumulation, clipping, and a checkpoint."""

from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from composer3d.integrations.lightning import Composer3DStrategy


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, bias=False), nn.GroupNorm(1, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def dataset(num):
    generator = torch.Generator().manual_seed(num)
    targets = torch.arange(num) % 8
    return TensorDataset(torch.randn(num, 1, 6, 6, generator=generator) + targets.view(-1, 1, 1, 1), targets)


def main(output_dir="out", batch_size=8):
    torch.manual_seed(1)
    strategy = Composer3DStrategy(Path(__file__).with_name("run.toml"))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset(64), batch_size=batch_size))
    losses = []
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            is_accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x, y = dataset(16).tensors
            losses.append(F.cross_entropy(model(x), y).item())
        fabric.print(f"epoch {epoch}: loss {losses[-1]:.4f}")
        fabric.save(f"{output_dir}/epoch-{epoch}", {"model": model, "optimizer": optimizer, "epoch": epoch})
    return losses


if __name__ == "__main__":
    main()
