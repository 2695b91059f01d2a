"""Metrics that plugins measure in a step, reduced over ranks in one collective.

Ranks have to measure the same ones, in one order. A checksum of these stands before the values, so that a rank that
measures others is found in the step in which it does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from composer3d.errors import HookError, QueryError
from composer3d.hooks import HooksInTurn
from composer3d.interfaces import Metric
from composer3d.processes.json_exchange import all_gather_json
from composer3d.step.control_numbers import ControlNumbers

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext
    from composer3d.hooks.blame import CheckedHook, Turns

__all__ = ["Measurement"]

_Kinds: TypeAlias = tuple[tuple[str, str, str], ...]  # plugin, name and reduction of each metric
_Answers: TypeAlias = tuple[str | None, ...]  # None for a plugin, then name and reduction of each of its metrics
_ROOM = 16
_SHOWN = 4
_MOST_KNOWN = 1024  # of a plugin that names its metrics anew in every step


@dataclass(frozen=True, kw_only=True, eq=False)
class _Metrics:
    """Metrics of this rank that were validated.

    Args:
        kinds: Of each.
        names: Of all.
        reductions: Of each its name, and what reduces the ranks' values.
        checksum: Of `kinds`.
    """

    kinds: _Kinds
    names: frozenset[str]
    reductions: tuple[tuple[str, Callable[[Sequence[float]], float]], ...]
    checksum: float

    @classmethod
    def of(cls, owners: Iterable[Any], measured: Iterable[Sequence[Metric]]) -> _Metrics:
        """Return what every plugin has measured."""
        pairs = [(owner.name, metric) for owner, found in zip(owners, measured, strict=True) for metric in found]
        kinds = tuple((owner, metric.name, metric.reduction) for owner, metric in pairs)
        return cls(
            kinds=kinds,
            names=frozenset(name for _, name, _ in kinds),
            reductions=tuple((name, _REDUCE[reduction]) for _, name, reduction in kinds),
            checksum=float(zlib.crc32(repr(kinds).encode())),
        )


class Measurement:
    """Calls every measuring plugin at the end of a step, and reduces the results over ranks.

    Plugins measure the same metrics in every step, so that only values change once their answers have been validated.

    Args:
        context: Complete.
        hooks: Implementations of `composer3d_measure`.
        acting: As for `HooksInTurn`.
        device: Of the gathered numbers.
    """

    def __init__(
        self, context: RunContext, hooks: Sequence[CheckedHook], acting: Turns | None, *, device: torch.device
    ) -> None:
        import torch

        self._context = context
        self._numbers = ControlNumbers(dtype=torch.float64, device=device, group=None)
        self._hooks = HooksInTurn(hooks, acting, are_known=self._are_known)
        self._known: dict[_Answers, _Metrics] = {}
        self._metrics: _Metrics | None = None  # of this step, where they are known
        self._values: list[float] = []
        self._room = _ROOM  # numbers of metrics that ranks exchange, alike on all of them
        self._were_any: bool | None = None  # None before the first step that asks

    def __call__(self, step: int, *, taken: Collection[str] = ()) -> dict[str, float]:
        """Return the metrics of a step, by name.

        Collectives: one all-gather of 17 numbers, or of one a metric and one more where there are more; none after a
            first one while no metric has been measured.

        Args:
            step: Number of the step.
            taken: Names of the run's own metrics.

        Raises:
            QueryError: Two metrics have one name, or one has a name of the run's own.
            HookError: Ranks measure different metrics; on all of them.
        """
        if not self._hooks.owners:
            return {}
        measured: Sequence[Sequence[Metric] | None] = self._hooks(context=self._context, step=step)
        metrics = self._metrics or self._learned(measured)
        if len(metrics.names) < len(metrics.kinds) or "step" in metrics.names or not metrics.names.isdisjoint(taken):
            raise _taken_twice(zip(self._hooks.owners, (found or () for found in measured), strict=True), taken)
        if not metrics.kinds and self._were_any is False:
            return {}
        self._were_any = bool(self._were_any or metrics.kinds)
        values = self._gathered(metrics)
        if values[0].count(metrics.checksum) < len(values[0]):
            everyone = [tuple(map(tuple, each)) for each in all_gather_json(metrics.kinds)]
            if len({*everyone}) > 1:  # else nobody answers: a rank of a plan
                _refuse(everyone, self._hooks)
        if len(metrics.kinds) > self._room:
            self._room = len(metrics.kinds)
            values = self._gathered(metrics)
        return {name: reduce(values[place]) for place, (name, reduce) in enumerate(metrics.reductions, 1)}

    def _are_known(self, measured: Sequence[Any]) -> bool:
        """Note the values; return whether the answers are those of an earlier step but for them.

        A loop over what is nearly always there: of exact types, each of which has been validated.
        """
        answers: list[str | None] = []
        values: list[float] = []
        self._metrics = None
        for found in measured:
            answers.append(None)
            if found is None:
                continue
            if type(found) is not list and type(found) is not tuple:
                return False
            for metric in found:
                if type(metric) is not Metric or type(value := metric.value) not in (float, int):
                    return False
                answers += (metric.name, metric.reduction)
                values.append(value)
        self._values = values
        try:
            self._metrics = self._known.get(tuple(answers))
        except TypeError:  # a name without a hash
            return False
        return self._metrics is not None

    def _learned(self, measured: Sequence[Sequence[Metric] | None]) -> _Metrics:
        """Return metrics that were not known, and remember them."""
        given = [found or () for found in measured]
        self._values = [metric.value for found in given for metric in found]
        metrics = _Metrics.of(self._hooks.owners, given)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        texts = ((None, *(text for each in found for text in (each.name, each.reduction))) for found in given)
        self._known[tuple(text for found in texts for text in found)] = metrics
        return metrics

    def _gathered(self, metrics: _Metrics) -> list[list[float]]:
        """Return the ranks' checksums of their metrics, then their values of each metric, where there is room."""
        own = self._values if len(self._values) <= self._room else ()
        numbers = [metrics.checksum, *own, *[0.0] * (self._room - len(own))]
        with self._context.span("all_gather", group="metrics", axis="world"):
            everyone = self._numbers.all_gather(numbers, num_ranks=self._context.world_size)
        return [everyone[place :: len(numbers)] for place in range(len(own) + 1)]


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
