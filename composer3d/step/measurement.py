"""Metrics that plugins measure in a step, reduced over ranks in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import QueryError
from composer3d.interfaces import Metric
from composer3d.step import control_numbers

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext
    from composer3d.hooks import HooksInTurn

__all__ = ["measure"]


def measure(
    context: RunContext,
    hooks: HooksInTurn,
    step: int,
    device: torch.device,
    taken: Collection[str] = (),
) -> dict[str, float]:
    """Call every measuring plugin and reduce the results.

    Collectives: one all-gather of one number a metric; none without metrics.

    Args:
        hooks: Implementations of `composer3d_measure`.
        step: Number of the step.
        device: Of the gathered numbers.
        taken: Names of the run's own metrics.

    Raises:
        QueryError: Two metrics have one name, or one has a name of the run's own.
    """
    if not hooks.owners:
        return {}
    measured: Sequence[Sequence[Metric] | None] = hooks(context=context, step=step)
    metrics = [metric for found in measured if found for metric in found]
    names = {metric.name for metric in metrics}
    if len(names) < len(metrics) or "step" in names or not names.isdisjoint(taken):
        raise _taken_twice(zip(hooks.owners, (found or () for found in measured), strict=True), taken)
    if not metrics:
        return {}
    import torch

    own = control_numbers.vector([metric.value for metric in metrics], dtype=torch.float64, device=device)
    with context.span("all_gather", group="metrics", axis="world"):
        everyone = control_numbers.all_gather(own, num_ranks=context.world_size)
    columns = zip(*everyone, strict=True)
    return {metric.name: _REDUCE[metric.reduction](values) for metric, values in zip(metrics, columns, strict=True)}


def _taken_twice(measured: Iterable[tuple[Any, Sequence[Metric]]], taken: Collection[str]) -> QueryError:
    """Return the error that names the first metric whose name is another's, or the run's own."""
    owners: dict[str, Any] = {}
    for plugin, metrics in measured:
        for name in (metric.name for metric in metrics):
            if name in owners:
                return QueryError(f'{owners[name]} and {plugin} both measure "{name}"; one would overwrite the other')
            if name == "step" or name in taken:
                return QueryError(
                    f'{plugin} measures "{name}", which is a metric of the run itself; give it another name'
                )
            owners[name] = plugin
    raise AssertionError("a name is there twice")


_REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    # Python's max hides a NaN that does not come first.
    "max": lambda values: math.nan if any(map(math.isnan, values)) else max(values),
    "mean": lambda values: sum(values) / len(values),
    "rank0": lambda values: values[0],
}
