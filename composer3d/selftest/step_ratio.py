"""Step times of a composition beside the same loop written by hand, on this machine's device.

Run as a program, `python -m composer3d.selftest.step_ratio hand cuda`, it prints one measurement; each is made in a
fresh process, and `hand`, `composer3d`, `hand` take turns, so that the control shows what the machine itself varies by.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib import resources
from typing import Any

from composer3d.selftest.compared_loops import composed_loop, handwritten_loop

__all__ = ["AUTHORS", "measure", "ratio_of"]

AUTHORS = ("hand", "composer3d", "hand")
_WARMUP, _WINDOWS, _WINDOW = 3, 4, 5
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

    def build() -> Any:
        return llama(**sizes, max_seq_len=seq_len)

    if author == "hand":
        step, close = handwritten_loop(build, tokens, device)
    else:
        torch.manual_seed(0)
        with resources.as_file(resources.files("composer3d").joinpath("selftest", "step_ratio.toml")) as path:
            step, close = composed_loop(build(), tokens, device, path)
    times = []
    for window in range(_WINDOWS + 1):
        began = _now(device)
        for number in range(_WARMUP if window == 0 else _WINDOW):
            loss = step(window * _WINDOW + number)
        if window:
            times.append((_now(device) - began) / _WINDOW)
    peak = torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else 0.0
    tokens_of_step, last = samples * seq_len, float(loss)
    close()
    return {"step_s": statistics.median(times), "tokens": tokens_of_step, "loss": last, "peak_gib": peak}


def _now(device: Any) -> float:
    """Return the time once the device is done; on a CPU, of this thread, which other processes do not lengthen."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], sys.argv[2])) + "\n")
