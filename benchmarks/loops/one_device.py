"""The training loop of the comparison."""

from __future__ import annotations

import torch
from meter import Meter
from small_llama import batches, build, loss_fn, read_config

config = read_config()
model = build(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
meter = Meter()
for tokens, targets in batches(config):
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
