"""The loop of `embedded.py` with the manifest that the command line names after the steps, and the model's module."""

from __future__ import annotations

import importlib
import sys

import torch
from meter import Meter
from small_llama import batches, loss_fn, read_config

import composer3d

config = read_config()
build = importlib.import_module(sys.argv[3]).build
run = composer3d.compose(build(config), sys.argv[2], loss_fn=loss_fn)
optimizer = run.optimizer(torch.optim.AdamW, lr=config.lr)
meter = Meter()
for tokens, targets in run.steps(batches(config, rank=run.context.data_parallel_rank)):
    loss = run.forward_backward(tokens, target=targets)
    run.clip_grad_norm_(config.clip)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
run.close()
