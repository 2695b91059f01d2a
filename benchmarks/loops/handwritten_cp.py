"""The training loop of the comparison with a sequence shared by ranks, written by hand for this model.

Command line: steps, then `gather` or `ring`. Parameters are sharded over all ranks by FSDP2. A rank has one chunk from
both ends of the sequence, so that causal attention is equal work everywhere. Gathered: each chunk attends to the keys
up to its end. Ring: zigzag ring attention, in which a step after the first is one block without a mask.

Source: the zigzag ring of ring-flash-attention, and the gathered keys of Llama 3's context parallelism, described in
Dubey et al., The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2; written anew.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meter import Meter
from small_llama import Attention, batches, build, loss_fn, read_config, rotate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer3d.torch_compat import (
    all_gather_single,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    reduce_scatter_single,
)


class Gathered(torch.autograd.Function):
    """Keys and values of all ranks, [ranks, ...]; backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        every = x.new_empty(size, *x.shape)
        all_gather_single(every.flatten(0, 1), x.contiguous(), group=dist.group.WORLD)
        return every

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        mine = torch.empty_like(grad[0])
        reduce_scatter_single(mine, grad.contiguous().flatten(0, 1), group=dist.group.WORLD)
        return mine


def gathered_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Return attention of this rank's two chunks to the keys up to the end of each."""
    every = Gathered.apply(torch.stack([k_BHTK, v_BHTK]))
    first, last = every.chunk(2, dim=4)
    k, v = torch.cat([*first, *reversed(last.unbind())], dim=3)
    chunks = []
    for chunk, number in zip(q_BHTK.chunk(2, 2), (rank, 2 * size - 1 - rank), strict=True):
        length, end = chunk.shape[2], (number + 1) * chunk.shape[2]
        mask = torch.ones(length, end, dtype=torch.bool).tril(end - length)
        chunks.append(F.scaled_dot_product_attention(chunk, k[:, :, :end], v[:, :, :end], mask))
    return torch.cat(chunks, 2)


def pass_on(x: Tensor) -> tuple[list[Any], Tensor, Tensor]:
    """Start sending to the next rank and receiving from the one before."""
    x, received = x.contiguous(), torch.empty_like(x)
    to, source = (rank + 1) % size, (rank - 1) % size
    return (
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, received, source)]),
        x,
        received,
    )


def arrived(message: tuple[list[Any], Tensor, Tensor]) -> Tensor:
    for work in message[0]:
        work.wait()
    return message[2]


def blocks(step: int, length: int) -> list[tuple[slice, slice, bool]]:
    """Return queries, keys and whether the block is causal: two diagonals and a square first, then one rectangle."""
    half, whole = length // 2, slice(0, length)
    first, last = slice(0, half), slice(half, length)
    if step == 0:
        return [(first, first, True), (last, first, False), (last, last, True)]
    return [(whole, first, False)] if step <= rank else [(last, whole, False)]


class RingAttention(torch.autograd.Function):
    """Causal attention with keys and values passed around the ranks, and their gradients after them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, kv = q.shape[-1] ** -0.5, torch.stack([k, v])
        o, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        for step in range(size):
            message = pass_on(kv) if step < size - 1 else None
            for rows, columns, is_causal in blocks(step, q.shape[2]):
                part, part_lse = cpu_flash_attention(
                    q[:, :, rows], kv[0, :, :, columns], kv[1, :, :, columns],
                    bias=None, is_causal=is_causal, scale=scale,
                )  # fmt: skip
                total = torch.logaddexp(lse[:, :, rows], part_lse)
                o[:, :, rows] *= (lse[:, :, rows] - total).exp()[..., None]
                o[:, :, rows] += (part_lse - total).exp()[..., None] * part
                lse[:, :, rows] = total
            kv = kv if message is None else arrived(message)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        scale, kv, grad = q.shape[-1] ** -0.5, torch.stack([k, v]), grad.contiguous()
        d_q, travelling = torch.zeros_like(q), None
        for step in range(size):
            message = pass_on(kv) if step < size - 1 else None
            d_kv = torch.zeros_like(kv)
            for rows, columns, is_causal in blocks(step, q.shape[2]):
                inputs = (q[:, :, rows], kv[0, :, :, columns], kv[1, :, :, columns])
                outputs = (o[:, :, rows], lse[:, :, rows])
                gradients = cpu_flash_attention_backward(
                    grad[:, :, rows], inputs, outputs, bias=None, is_causal=is_causal, scale=scale
                )
                d_q[:, :, rows] += gradients[0]
                d_kv[0, :, :, columns] += gradients[1]
                d_kv[1, :, :, columns] += gradients[2]
            travelling = pass_on(d_kv if travelling is None else d_kv + arrived(travelling))
            kv = kv if message is None else arrived(message)
        assert travelling is not None
        d_k, d_v = arrived(travelling)
        return d_q, d_k, d_v


def forward(module: Attention, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Do what the model's attention does, but for the attention itself."""
    q_BHTK, k_BHTK, v_BHTK = (
        w(x_BTD).unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for w in (module.wq, module.wk, module.wv)
    )
    q_BHTK, k_BHTK = (x * cos_TK + rotate(x) * sin_TK for x in (q_BHTK, k_BHTK))
    o_BHTK = attention(q_BHTK, k_BHTK, v_BHTK)
    return module.wo(o_BHTK.transpose(1, 2).flatten(2))


config = read_config()
attention = {"gather": gathered_attention, "ring": RingAttention.apply}[sys.argv[2]]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
positions = torch.arange(config.seq_len).chunk(2 * size)
mine = torch.cat([positions[rank], positions[2 * size - 1 - rank]])
model = build(config)
model.cos, model.sin = model.cos[mine], model.sin[mine]
Attention.forward = forward
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
for block in model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
meter = Meter()
for tokens, targets in batches(config, rank=0):
    loss = loss_fn(model(tokens[:, mine]), targets[:, mine])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
dist.destroy_process_group()
