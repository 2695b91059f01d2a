"""What plugins measure in a step, reduced over ranks in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import QueryError
from composer3d.protocol import Metric

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext

__all__ = ["measure"]


def measure(
    context: RunContext, functions: Sequence[Callable[..., Any]], step: int, device: torch.device
) -> dict[str, float]:
    """Call every measuring plugin and reduce the results.

    Collectives: one all-gather of one number a metric; none without metrics.

    Args:
        context: The run.
        functions: Frozen implementations of `composer3d_measure`.
        step: Its number.
        device: For the gathered numbers.

    Raises:
        QueryError: Two metrics have one name.
    """
    metrics: list[Metric] = [metric for function in functions for metric in function(context=context, step=step) or ()]
    if not metrics:
        return {}
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise QueryError(f'two plugins measure "{twice}"; one would overwrite the other')
    import torch
    import torch.distributed as dist

    own = torch.tensor([metric.value for metric in metrics], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(context.world_size)]
    dist.all_gather(everyone, own)
    table = torch.stack(everyone)
    reduced = {"sum": table.sum(0), "max": table.amax(0), "mean": table.mean(0), "rank0": table[0]}
    return {metric.name: float(reduced[metric.reduction][index]) for index, metric in enumerate(metrics)}
