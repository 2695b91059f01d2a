"""Stashes between a plan and the plugin that splits a model into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["StageForms", "WarmUp"]


@dataclass(kw_only=True, eq=False)
class StageForms:
    """Stash by which a plan knows the stages of a pipeline that are unlike others: `context.stash(StageForms)`.

    A plugin that splits sets it. Without it every rank has one stage, and none receives what another one does.

    Attributes:
        of_ranks: The stages of every rank along the pipeline's axis.
        received: By stage, the form of every value that it receives, as the whole model has it. Where two stages have
            equal ones, and transforms treat what runs before them alike, they receive equal tensors.
        calls: By stage, its calls of modules: the FQN; the cost, that of what the forward itself computes before it
            included; and that alone, which every stage computes that comes to it, those behind too.
    """

    of_ranks: tuple[tuple[int, ...], ...] = ()
    received: tuple[tuple[Hashable, ...], ...] = ()
    calls: tuple[tuple[tuple[str, Hashable, tuple[float, ...]], ...], ...] = ()

    def around(self, stage: int) -> Counter[Hashable]:
        """Return what a stage receives and sends, each with its place, and computes between calls of others."""
        found: Counter[Hashable] = Counter()
        for kind, values in zip(("received", "sent"), self.received[stage : stage + 2], strict=False):
            found.update((kind, place, form) for place, form in enumerate(values))
        for calls in self.calls[:stage]:
            found.update(("between", between) for *_, between in calls if any(between))
        return found

    def costs(self, stage: int) -> Counter[Hashable]:
        """Return the costs of a stage's calls."""
        return Counter(("call", cost) for calls in self.calls[stage : stage + 1] for _, cost, _ in calls)


@dataclass(kw_only=True, eq=False)
class WarmUp:
    """Stash by which a plan traces fewer micro-batches in flight than a schedule has: `context.stash(WarmUp)`.

    Attributes:
        can_be_shorter: A plugin sets it whose schedule of one stage a rank can begin its backwards earlier, and runs
            fewer micro-batches then than the schedule needs.
        most_in_flight: A plan sets it while it traces: micro-batches that the rank holds at most; None: as the schedule
            says.
    """

    can_be_shorter: bool = False
    most_in_flight: int | None = None
