"""The training loop of the comparison, with FSDP2 written by hand; the command line names the model's module."""

from __future__ import annotations

import importlib
import sys

import torch
import torch.distributed as dist
from meter import Meter
from small_llama import batches, loss_fn, read_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

config = read_config()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
model = importlib.import_module(sys.argv[2]).build(config)
for block in model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
meter = Meter()
for tokens, targets in batches(config, rank=dist.get_rank()):
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
dist.destroy_process_group()
