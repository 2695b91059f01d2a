"""Matrix products and attention at many sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from composer3d.planning.hardware.timed_calls import REPEATS, least_seconds, seconds_of

__all__ = ["attention_flops", "attention_speeds", "gemm_shapes", "gemm_speed"]

_SUM_OPS = 2  # multiplication and addition
_BACKWARD = 2.5  # a fused backward computes five products where the forward computes two
_SLOW_CPU, _SLOW_GPU = 2e10, 2e13  # operations a second, for what a budget allows
_LENGTHS = (64, 128, 256, 512, 1024)
_APART = 2**23  # bytes after which the same factors are used again
_MOST_SETS = 8


def gemm_shapes(on_cpu: bool, budget: float) -> list[tuple[int, int, int]]:
    """Return rows, columns and sum lengths, the smaller ones first, as many as the budget allows at a low speed.

    They are what small models have on a CPU, and large ones on a GPU; all ranks take the same.

    Args:
        on_cpu: Which of the two.
        budget: Seconds for all of them.
    """
    left = budget * (_SLOW_CPU if on_cpu else _SLOW_GPU)
    chosen: list[tuple[int, int, int]] = []
    for shape in sorted(_shapes(on_cpu), key=math.prod):
        left -= (REPEATS + 2) * _SUM_OPS * math.prod(shape)
        if left < 0 and len(chosen) >= REPEATS:
            break
        chosen.append(shape)
    return chosen


def _shapes(on_cpu: bool) -> Iterator[tuple[int, int, int]]:
    rows = (64, 512, 2048) if on_cpu else (512, 2048, 8192)
    widths = (64, 256, 1024) if on_cpu else (1024, 4096, 8192)
    for m in rows:
        for width in widths:
            yield m, width, width
            yield m, 4 * width, width
            yield m, width, 4 * width


def gemm_speed(device: torch.device, dtype: torch.dtype, dims: tuple[int, int, int], budget: float) -> float:
    """Return operations a second of a product as a linear layer and its backward compute it.

    One factor after the other is transposed, as in the layer's forward, its inputs' and its weights' gradient; and on a
    CPU other factors are taken every time, as a step does. What comes with every call there, `least_seconds`, is taken
    off; what a product takes besides, such as to look its kernel up, is its own.

    Args:
        device: Where.
        dtype: Of the factors.
        dims: Rows, columns, sum length.
        budget: Seconds for all calls.
    """
    m, n, k = dims

    def factors(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        made = torch.randn(shape, device=device).to(dtype)
        return made.t() if transposed else made

    size = torch.empty((), dtype=dtype).element_size() * (m * k + k * n + m * n)
    rounds = max(1, min(_MOST_SETS, _APART // size)) if device.type == "cpu" else 1
    pairs = cycle(
        [
            (factors(m, k, left), factors(k, n, right))
            for _ in range(rounds)
            for left, right in ((False, True), (False, False), (True, False))
        ]
    )

    def product() -> torch.Tensor:
        left, right = next(pairs)
        return left @ right

    whole = seconds_of(device, product, budget)
    if device.type == "cpu":
        whole = max(whole - least_seconds(device, budget / 10), whole / 10)
    return _SUM_OPS * m * n * k / whole


def attention_flops(shape: Sequence[int]) -> float:
    """Return what a causal kernel's forward executes: two products of half of the square.

    Args:
        shape: Of the queries: batch, heads, length, width of a head.
    """
    batch, heads, length, width = shape
    return _SUM_OPS * 2 * batch * heads * length**2 * width / 2


def attention_speeds(
    device: torch.device, dtypes: Sequence[torch.dtype], budget: float
) -> Iterator[tuple[str, int, int, float, float]]:
    """Yield dtype, length, width of a head, and operations a second of a causal kernel's forward and backward.

    Args:
        device: Where.
        dtypes: Each of them.
        budget: Seconds for all.
    """
    on_cpu = device.type == "cpu"
    sizes = [(length, width) for length in _LENGTHS for width in (16, 32, 64)] if on_cpu else [(4096, 128)]
    each = budget / (len(dtypes) * len(sizes))
    for dtype in dtypes:
        for length, width in sizes:
            shape = (max(1, 512 // length), 4, length, width) if on_cpu else (4, 16, length, width)
            name = str(dtype).removeprefix("torch.")
            yield (name, length, width, *_attention(device, dtype, shape, each))


def _attention(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], budget: float) -> tuple[float, float]:
    # As a model has them: heads of a longer last dim, turned to the front; and on a CPU others every time.
    batch, heads, length, width = shape

    def turned() -> torch.Tensor:
        return torch.randn(batch, length, heads, width, device=device).to(dtype).transpose(1, 2)

    def taken() -> tuple[torch.Tensor, ...]:
        return (*(turned().requires_grad_() for _ in range(3)), turned())

    first = taken()
    size = sum(each.numel() * each.element_size() for each in first)
    rounds = max(1, min(_MOST_SETS, _APART // size)) if device.type == "cpu" else 1
    sets = cycle([first, *(taken() for _ in range(rounds - 1))])

    def forward() -> torch.Tensor:
        q, k, v, _ = next(sets)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> Any:
        q, k, v, gradient = next(sets)
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    ahead = seconds_of(device, forward, budget / 2)
    back = max(seconds_of(device, both, budget / 2) - ahead, ahead / 2)
    if device.type == "cpu":
        ahead = max(ahead - least_seconds(device, budget / 10), ahead / 10)
    flops = attention_flops(shape)
    return flops / ahead, _BACKWARD * flops / back
