"""Metrics that plugins measure in a step, reduced over ranks in one collective.

Ranks have to measure the same ones, in one order. A checksum of these stands before the values, so that a rank that
measures others is found in the step in which it does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from composer3d.errors import HookError, QueryError
from composer3d.interfaces import Metric
from composer3d.processes.json_exchange import all_gather_json
from composer3d.step import control_numbers

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext
    from composer3d.hooks import HooksInTurn

__all__ = ["measure"]

_Kinds: TypeAlias = tuple[tuple[str, str, str], ...]  # plugin, name and reduction of each metric
_ROOM = 16
_SHOWN = 4


@dataclass
class _Measured:
    """Stash of what is known of the metrics of all ranks.

    Attributes:
        room: Numbers of metrics that ranks exchange, alike on all of them.
        is_known: Whether any were measured; None before the first step that asks.
        checksums: By metrics.
    """

    room: int = _ROOM
    is_known: bool | None = None
    checksums: dict[_Kinds, float] = field(default_factory=dict)

    def checksum(self, kinds: _Kinds) -> float:
        if kinds not in self.checksums:
            self.checksums[kinds] = float(zlib.crc32(repr(kinds).encode()))
        return self.checksums[kinds]


def measure(
    context: RunContext,
    hooks: HooksInTurn,
    step: int,
    device: torch.device,
    taken: Collection[str] = (),
) -> dict[str, float]:
    """Call every measuring plugin and reduce the results.

    Collectives: one all-gather of 17 numbers, or of one a metric and one more where there are more; none after a first
        one while no metric has been measured.

    Args:
        hooks: Implementations of `composer3d_measure`.
        step: Number of the step.
        device: Of the gathered numbers.
        taken: Names of the run's own metrics.

    Raises:
        QueryError: Two metrics have one name, or one has a name of the run's own.
        HookError: Ranks measure different metrics; on all of them.
    """
    if not hooks.owners:
        return {}
    measured: Sequence[Sequence[Metric] | None] = hooks(context=context, step=step)
    metrics = [metric for found in measured if found for metric in found]
    names = {metric.name for metric in metrics}
    if len(names) < len(metrics) or "step" in names or not names.isdisjoint(taken):
        raise _taken_twice(zip(hooks.owners, (found or () for found in measured), strict=True), taken)
    known = context.stash(_Measured)
    if not metrics and known.is_known is False:
        return {}
    kinds = tuple(
        (owner.name, metric.name, metric.reduction)
        for owner, found in zip(hooks.owners, measured, strict=True)
        for metric in found or ()
    )
    known.is_known = bool(known.is_known or metrics)
    values = [metric.value for metric in metrics]
    checksums, *columns = _gathered(context, known, kinds, values, device)
    if len({*checksums}) > 1:
        everyone = [tuple(map(tuple, each)) for each in all_gather_json(kinds)]
        if len({*everyone}) > 1:  # else nobody answers: a rank of a plan
            _refuse(everyone, hooks)
    if len(metrics) > known.room:
        known.room = len(metrics)
        _, *columns = _gathered(context, known, kinds, values, device)
    return {metric.name: _REDUCE[metric.reduction](found) for metric, found in zip(metrics, columns, strict=False)}


def _gathered(
    context: RunContext, known: _Measured, kinds: _Kinds, values: Sequence[float], device: torch.device
) -> list[tuple[float, ...]]:
    """Return the checksums of all ranks' metrics, and the values of each metric where there is room for all."""
    import torch

    own = values if len(values) <= known.room else ()
    numbers = [known.checksum(kinds), *own, *[0.0] * (known.room - len(own))]
    vector = control_numbers.vector(numbers, dtype=torch.float64, device=device)
    with context.span("all_gather", group="metrics", axis="world"):
        return list(zip(*control_numbers.all_gather(vector, num_ranks=context.world_size), strict=True))


def _refuse(everyone: Sequence[Sequence[Any]], hooks: HooksInTurn) -> NoReturn:
    """Raise an error that names the first metric that some ranks alone measure, and these."""
    first = next((kind for rank in everyone for kind in rank if not all(kind in other for other in everyone)), None)
    if first is None:
        first, said = everyone[0][0], ", with others, in another order on some ranks"
    else:
        ranks = [str(number) for number, rank in enumerate(everyone) if first in rank]
        shown = ", ".join(ranks[:_SHOWN]) + ", ..." * (len(ranks) > _SHOWN)
        said = f" ({first[2]}) on rank{'s' * (len(ranks) > 1)} {shown} alone"
    owner = next(owner for owner in hooks.owners if owner.name == first[0])
    raise HookError(
        f'composer3d_measure of {owner.name} returned the metric "{first[1]}"{said}: ranks reduce them one by one, so '
        "return the same ones on every rank, in one order, with 0 or NaN where a rank has none",
        path=(owner.info.family, owner.name),
        place=owner.place,
        is_own=True,
    )


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
