"""Metrics that plugins measure in a step, reduced over ranks in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import QueryError
from composer3d.interfaces import Metric

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext

__all__ = ["measure"]


def measure(
    context: RunContext,
    functions: Sequence[tuple[Any, Callable[..., Any]]],
    step: int,
    device: torch.device,
    taken: Collection[str] = (),
) -> dict[str, float]:
    """Call every measuring plugin and reduce the results.

    Collectives: one all-gather of one number a metric; none without metrics.

    Args:
        functions: Frozen implementations of `composer3d_measure`, each with its plugin.
        step: Number of the step.
        device: Of the gathered numbers.
        taken: Names of the run's own metrics.

    Raises:
        QueryError: Two metrics have one name, or one has a name of the run's own.
    """
    metrics: list[Metric] = []
    owners: dict[str, Any] = {}
    for plugin, function in functions:
        for metric in function(context=context, step=step) or ():
            name = metric.name
            if name in owners:
                raise QueryError(f'{owners[name]} and {plugin} both measure "{name}"; one would overwrite the other')
            if name == "step" or name in taken:
                raise QueryError(
                    f'{plugin} measures "{name}", which is a metric of the run itself; give it another name'
                )
            owners[name] = plugin
            metrics.append(metric)
    if not metrics:
        return {}
    import torch
    import torch.distributed as dist

    own = torch.tensor([metric.value for metric in metrics], dtype=torch.float64, device=device)
    everyone = [torch.empty_like(own) for _ in range(context.world_size)]
    with context.span("all_gather", group="metrics", axis="world"):
        dist.all_gather(everyone, own)
    columns = zip(*(values.tolist() for values in everyone), strict=True)
    return {metric.name: _REDUCE[metric.reduction](values) for metric, values in zip(metrics, columns, strict=True)}


_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    # Python's max hides a NaN that does not come first.
    "max": lambda values: math.nan if any(map(math.isnan, values)) else max(values),
    "mean": lambda values: sum(values) / len(values),
    "rank0": lambda values: values[0],
}
