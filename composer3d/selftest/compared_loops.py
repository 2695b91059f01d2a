"""A training step of one device twice: composed, and written by hand with torch's own calls, as its measure.

tokens_BL are the samples and one token more: a model is given tokens[:, :-1] and predicts tokens[:, 1:].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["LR", "Loop", "composed_loop", "handwritten_loop", "sum_loss"]

LR = 1e-4
# A step by its number, which returns the loss, and the end of the loop.
Loop = tuple[Callable[[int], Any], Callable[[], None]]


def sum_loss(logits_BLV: Tensor, targets_BL: Tensor) -> tuple[Tensor, int]:
    """Return the sum over tokens and their number, as composer3d normalises it."""
    import torch.nn.functional as F

    total = F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), reduction="sum")
    return total, targets_BL.numel()


def handwritten_loop(
    build: Callable[[], Any],
    tokens_BL: Tensor,
    device: torch.device,
    *,
    convert: Callable[[nn.Module], object] | None = None,
    compiled: bool = False,
) -> Loop:
    """Return the loop that one writes with torch's own calls: FSDP2 over one rank, bfloat16, fused AdamW.

    Args:
        build: Makes a model with `layers`.
        tokens_BL: On the device.
        device: Of the only rank; its process group is made here.
        convert: Called with the model before it is sharded.
        compiled: Whether layers are compiled.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = build().to(device)
    if convert is not None:
        convert(model)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(number: int) -> Any:
        total, count = sum_loss(model(tokens_BL[:, :-1]), tokens_BL[:, 1:])
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, dist.destroy_process_group


def composed_loop(build: Any, tokens_BL: Tensor, device: torch.device, manifest: Path) -> Loop:
    """Return the same loop by a manifest.

    Args:
        build: A model, or a function that makes it.
        tokens_BL: On the device.
        device: Of the only rank.
        manifest: What is composed.
    """
    import torch

    from composer3d import compose

    run = compose(build, manifest, loss_fn=sum_loss, device=device)
    optimizer = run.optimizer(torch.optim.AdamW, lr=LR, fused=True)

    def step(number: int) -> Any:
        with run.step(number):
            loss = run.forward_backward(tokens_BL[:, :-1], target=tokens_BL[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, run.close
