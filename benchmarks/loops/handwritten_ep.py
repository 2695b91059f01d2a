"""The training loop of the comparison with experts on two ranks, written by hand for this model.

Everything but experts is sharded over all ranks by FSDP2. A rank holds its part of the experts, and rows travel by
all-to-alls: counts, rows, results; in the backward their gradients. Weights are applied where the tokens are.
"""

from __future__ import annotations

from typing import Any

import small_moe
import torch
import torch.distributed as dist
from meter import Meter
from small_llama import batches, loss_fn, read_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def all_to_all(x_RD: Tensor, received: list[int], sent: list[int]) -> Tensor:
    result_RD = x_RD.new_empty(sum(received), x_RD.shape[1])
    dist.all_to_all_single(result_RD, x_RD.contiguous(), received, sent)
    return result_RD


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; backward their gradients home."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = received, sent
        return all_to_all(x_RD, received, sent)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        received, sent = ctx.sizes
        return all_to_all(grad_RD, sent, received), None, None


def forward(module: small_moe.Experts, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Do what the model's experts do, with those of other ranks."""
    chosen_R, top_k = index_TK.reshape(-1), index_TK.shape[-1]
    order_R, counts_N = chosen_R.argsort(stable=True), chosen_R.bincount(minlength=small_moe.NUM_EXPERTS)
    incoming_N = torch.empty_like(counts_N)
    dist.all_to_all_single(incoming_N, counts_N)
    incoming_SN = incoming_N.view(size, -1)  # S ranks that send
    sent, received = (counts.view(size, -1).sum(1).tolist() for counts in (counts_N, incoming_N))
    rows_RD = Exchange.apply(x_TD[order_R // top_k], received, sent)
    experts_R = torch.arange(incoming_SN.shape[1]).repeat(size).repeat_interleave(incoming_N)
    by_expert_R = experts_R.argsort(stable=True)
    out_RD = module.run(rows_RD[by_expert_R], incoming_SN.sum(0))
    out_RD = Exchange.apply(torch.empty_like(out_RD).index_copy(0, by_expert_R, out_RD), sent, received)
    out_TKD = torch.empty_like(out_RD).index_copy(0, order_R, out_RD).unflatten(0, (-1, top_k))
    return (out_TKD * weights_TK[..., None]).sum(1)


config = read_config()
small_moe.Experts.forward = forward
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = small_moe.build(config)
mixtures = [module for module in model.modules() if isinstance(module, small_moe.Experts)]
for module in mixtures:
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(parameter.detach().chunk(size)[rank].clone()))
own = [parameter for module in mixtures for parameter in module.parameters()]
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))
for block in model.layers:
    fully_shard(block, mesh=mesh, ignored_params=set(own))
fully_shard(model, mesh=mesh, ignored_params=set(own))
shared = [parameter for parameter in model.parameters() if not any(parameter is each for each in own)]
optimizer = torch.optim.AdamW([{"params": shared}, {"params": own}], lr=config.lr)
meter = Meter()
for tokens, targets in batches(config, rank=rank):
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    for parameter in own:
        parameter.grad.div_(size)  # FSDP2 takes means of the others
    squares = get_total_norm([parameter.grad for parameter in own]).square()
    dist.all_reduce(squares)
    norm = (squares + get_total_norm([parameter.grad for parameter in shared]).full_tensor().square()).sqrt()
    for parameters in (shared, own):
        clip_grads_with_norm_(parameters, config.clip, norm)
    optimizer.step()
    optimizer.zero_grad()
    meter.step(loss)
meter.report()
dist.destroy_process_group()
