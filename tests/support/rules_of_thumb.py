"""Closed forms that the literature states, under the definitions that make each right.

They are what plans are checked against by hand, and what the tests hold the literature's own figures to.
"""

from __future__ import annotations

import math

__all__ = [
    "bubble_relative",
    "bubble_share",
    "data_parallel_traffic",
    "days",
    "devices_for",
    "recompute_factor",
    "ring_traffic",
    "scores_bytes",
    "step_seconds",
    "tensor_parallel_payload",
]


def ring_traffic(num_ranks: int, *, passes: int = 2) -> float:
    """Return the bytes that a rank sends in an all-reduce (two passes) or a gather (one), as a multiple of the buffer.

    A pipelined tree sends as much: log2 N is in its latency, not in its traffic.

    >>> ring_traffic(64)
    1.96875
    """
    return passes * (num_ranks - 1) / num_ranks


def data_parallel_traffic(zero: int, *, num_microbatches: int = 1) -> int:
    """Return the elements that a rank sends a step as a multiple of the parameters, for many ranks.

    Copies all-reduce gradients (2). Stages 1 and 2 reduce-scatter gradients and gather parameters (2). Stage 3 gathers
    them in the forward and in the backward instead (3), in every micro-batch.

    >>> [data_parallel_traffic(zero) for zero in (0, 1, 2, 3)]
    [2, 2, 2, 3]
    """
    return 2 if zero < 3 else 3 * num_microbatches


def bubble_share(stages: int, microbatches: int, *, stages_per_rank: int = 1) -> float:
    """Return idle time as a part of the step, for GPipe and 1F1B, or interleaved."""
    return (stages - 1) / (microbatches * stages_per_rank + stages - 1)


def bubble_relative(stages: int, microbatches: int, *, stages_per_rank: int = 1) -> float:
    """Return idle time relative to the step without it: another denominator, another figure."""
    return (stages - 1) / (microbatches * stages_per_rank)


def recompute_factor(*, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return how much more is computed where the backward runs the whole forward again."""
    return (2 * forward + backward) / (forward + backward)


def tensor_parallel_payload(tokens: int, hidden: int, *, size: float = 2, recompute: bool = False) -> float:
    """Return the bytes that tp's all-reduces carry in one layer and step: two forward, two backward.

    Args:
        tokens: Of the batch.
        hidden: Width.
        size: Bytes of an element.
        recompute: Whether the backward runs the forward, and its two all-reduces, again.
    """
    return (6 if recompute else 4) * tokens * hidden * size


def scores_bytes(seq_len: int, *, size: float = 2, heads: int = 1) -> float:
    """Return the bytes of attention's scores where they are kept: of one sequence."""
    return size * heads * float(seq_len) ** 2


def devices_for(total_bytes: float, device_bytes: float) -> int:
    """Return how many devices hold so much, if it divided evenly."""
    return math.ceil(total_bytes / device_bytes)


def days(num_parameters: float, num_tokens: float, *, devices: int, peak: float, mfu: float) -> float:
    """Return how long a run takes by 6 N D."""
    return 6 * num_parameters * num_tokens / (devices * peak * mfu) / 86400


def step_seconds(num_parameters: float, tokens: float, *, devices: int, peak: float, mfu: float) -> float:
    """Return how long a step takes by 6 N D."""
    return 6 * num_parameters * tokens / (devices * peak * mfu)
