"""Step times of a composition beside the same loop written by hand, on this machine's device.

Run as a program, `python -m composer3d.selftest.step_ratio hand cuda`, it prints one measurement; each is made in a
fresh process, and `hand`, `composer3d`, `hand` take turns, so that the control shows what the machine itself varies by.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

__all__ = ["AUTHORS", "measure", "ratio_of"]

AUTHORS = ("hand", "composer3d", "hand")
_LR, _WARMUP, _WINDOWS, _WINDOW = 1e-4, 3, 4, 5
# Of a model that keeps a GPU busy, and of one that a CPU steps in milliseconds.
_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"dim": 2048, "num_layers": 4, "num_heads": 16, "vocab_size": 32768},
    "cpu": {"dim": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256},
}
_BATCH = {"cuda": (4, 2048), "cpu": (4, 64)}


def ratio_of(measured: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratio of tokens a second to those by hand, that of the last by hand to the first, and of losses.

    Args:
        measured: In the order of `AUTHORS`.
    """
    first, composed, last = (1.0 / each["step_s"] for each in measured)
    return {
        "ratio": composed / ((first + last) / 2),
        "control": last / first,
        "loss_apart": abs(measured[1]["loss"] - measured[0]["loss"]) / abs(measured[0]["loss"]),
        "tokens_per_s": composed * measured[1]["tokens"],
        "peak_gib": measured[1]["peak_gib"],
    }


def measure(author: str, kind: str) -> dict[str, Any]:
    """Train a Llama-shaped model for some steps on one device and time them.

    Args:
        author: `hand` or `composer3d`.
        kind: `cuda` or `cpu`.

    Returns:
        Seconds of a step (the median of windows), tokens of one, the last loss, and the peak of memory in GiB.
    """
    import torch

    from composer3d.models import llama

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    samples, seq_len = _BATCH[kind]
    sizes = _SIZES[kind]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (samples, seq_len + 1), generator=generator).to(device)
    torch.manual_seed(0)
    step = (_by_hand if author == "hand" else _composed)(lambda: llama(**sizes, max_seq_len=seq_len), tokens, device)
    times = []
    for window in range(_WINDOWS + 1):
        began = _now(device)
        for number in range(_WARMUP if window == 0 else _WINDOW):
            loss = step(window * _WINDOW + number)
        if window:
            times.append((_now(device) - began) / _WINDOW)
    peak = torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else 0.0
    tokens_of_step = samples * seq_len
    return {"step_s": statistics.median(times), "tokens": tokens_of_step, "loss": float(loss), "peak_gib": peak}


def _now(device: Any) -> float:
    """Return the time once the device is done; on a CPU, of this thread, which other processes do not lengthen."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def _sum_loss(logits: Any, targets: Any) -> tuple[Any, int]:
    import torch.nn.functional as F

    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return total, targets.numel()


def _by_hand(build: Callable[[], Any], tokens: Any, device: Any) -> Callable[[int], Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = build().to(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)

    def step(number: int) -> Any:
        total, count = _sum_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _composed(build: Callable[[], Any], tokens: Any, device: Any) -> Callable[[int], Any]:
    import torch

    from composer3d import compose

    with resources.as_file(resources.files("composer3d").joinpath("selftest", "step_ratio.toml")) as path:
        run = compose(build(), path, loss_fn=_sum_loss, device=device)
    optimizer = run.optimizer(torch.optim.AdamW, lr=_LR, fused=True)

    def step(number: int) -> Any:
        with run.step(number):
            loss = run.forward_backward(tokens[:, :-1], target=tokens[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], sys.argv[2])) + "\n")
