"""The training loop of the comparison in up to three dimensions, with torch's own calls, written by hand.

Command line: steps, then the degrees pp, dp and tp. Tensor parallelism is Megatron's with sequence parallelism, data
parallelism FSDP2, the pipeline 1F1B with a micro-batch a sequence.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from meter import Meter
from small_llama import SmallLlama, batches, build, loss_fn, read_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Stage(nn.Module):
    """The layers from `start` to `end`, with the embedding on the first stage, norm and head on the last."""

    def __init__(self, model: SmallLlama, start: int, end: int) -> None:
        super().__init__()
        self.tok = model.tok if start == 0 else None
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in range(start, end)})
        is_last = end == len(model.layers)
        self.norm, self.out = (model.norm, model.out) if is_last else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tok is not None:
            x = self.tok(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.out is None else self.out(self.norm(x))


def cut_matrices(model: Stage, mesh: DeviceMesh) -> None:
    whole = {"tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
    whole["out"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {name: style for name, style in whole.items() if getattr(model, name) is not None})
    block = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    block |= {f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")}
    block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "mlp.w2")}
    block |= {name: SequenceParallel() for name in ("norm1", "norm2")}
    given = (Shard(1), None, None)
    block["attention"] = PrepareModuleInput(input_layouts=given, desired_input_layouts=(Replicate(), None, None))
    block["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers.values():
        layer.attention.num_heads //= mesh.size()
        parallelize_module(layer, mesh, block)


def clip(parameters: list[nn.Parameter], limit: float, group: dist.ProcessGroup) -> None:
    """Clip by the norm over all stages."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    square = norm**2
    dist.all_reduce(square, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())


config = read_config()
pp, dp, tp = map(int, sys.argv[2:5])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp_shard", "tp"))
stage_index = mesh["pp"].get_local_rank()
num_layers = config.num_layers // pp
model = Stage(build(config), stage_index * num_layers, (stage_index + 1) * num_layers)
if tp > 1:
    cut_matrices(model, mesh["tp"])
for block in model.layers.values():
    fully_shard(block, mesh=mesh["dp_shard"])
fully_shard(model, mesh=mesh["dp_shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
parameters = list(model.parameters())
pipeline = mesh["pp"].get_group()
if pp > 1:
    stage = PipelineStage(model, stage_index, pp, torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(stage, n_microbatches=config.batch, loss_fn=loss_fn)
meter = Meter()
for tokens, targets in batches(config, rank=mesh["dp_shard"].get_local_rank()):
    if pp > 1:
        losses: list[Tensor] = []
        arguments = (tokens,) if stage_index == 0 else ()
        schedule.step(*arguments, target=targets if stage_index == pp - 1 else None, losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, group=pipeline, group_src=pp - 1)
    else:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
    clip(parameters, config.clip, pipeline)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
dist.destroy_process_group()
