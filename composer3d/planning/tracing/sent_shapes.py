"""Shapes that stages of a pipeline send each other, from traces of the stages that were traced."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from composer3d.planning.schedules.planned_stages import StageForms
from composer3d.planning.tracing.equal_blocks import treatments

if TYPE_CHECKING:
    from composer3d.composition import Preparation

__all__ = ["SentShapes", "received_forms"]


class _HeardError(Exception):
    """Ends a trace that is made for the shapes which a stage sends, once these are known."""


class SentShapes:
    """Descriptions of what stages send, as far as they are known, by stage.

    What a stage receives is what the stage before it sends. Where that was not traced, another one tells it, of which
    the split says that what it sends has the same form.

    Args:
        preparation: Of the job.
        num_positions: Ranks along the axes of stages.
    """

    def __init__(self, preparation: Preparation, num_positions: int) -> None:
        stages = preparation.context.stash(StageForms).of_ranks
        self._stages = stages or tuple((position,) for position in range(num_positions))
        self._owners = {stage: position for position, those in enumerate(self._stages) for stage in those}
        self._received = received_forms(preparation)
        self._sent: dict[int, Any] = {}
        self._until: int | None = None

    def owner(self, stage: int) -> int:
        """Return the position in the pipeline of the rank that has a stage."""
        return self._owners[stage]

    @contextlib.contextmanager
    def listening(self, stage: int) -> Iterator[None]:
        """End what is traced inside as soon as a stage has sent, in place of running its step."""
        before, self._until = self._until, stage
        try:
            yield
        except _HeardError:
            pass
        finally:
            self._until = before

    def unknown(self, position: int) -> Iterator[int]:
        """Yield stages that send what a position's stages receive, where nothing tells it; of equal ones the first.

        A stage that its rank runs before tells them too, while that is traced. What was traced in the meantime counts.
        """
        mine = [stage for stage in self._stages[position] if self._until is None or stage <= self._until]
        for stage in mine:
            sources = [*self._sent, *(own for own in mine if own < stage and own + 1 not in mine)]
            if stage and stage - 1 not in mine and not any(self._is_alike(stage - 1, source) for source in sources):
                yield next(first for first in range(stage) if self._is_alike(stage - 1, first))

    def note(self, stage: int, _: int, description: Any) -> None:
        """Record what a stage sends. It may be all that is listened for."""
        self._sent[stage] = description
        if stage == self._until:
            raise _HeardError

    def wanted(self, _: int, source: int) -> Any:
        """Return what a stage sends; if it was not traced, what one sends of which the split says that it is alike."""
        alike = [stage for stage in self._sent if self._is_alike(source, stage)]
        return self._sent[min(alike, key=lambda stage: (abs(stage - source), stage))]

    def _is_alike(self, one: int, other: int) -> bool:
        return one == other or bool(self._received and self._received[one + 1] == self._received[other + 1])


def received_forms(preparation: Preparation) -> list[Hashable]:
    """Return, by stage, the form of what it receives and of all that runs before it; empty where no split says it."""
    forms = preparation.context.stash(StageForms)
    names = list(dict.fromkeys(fqn for calls in forms.calls for fqn, *_ in calls))
    treated = dict(zip(names, treatments(preparation, names), strict=True))
    before: frozenset[Hashable] = frozenset()
    found: list[Hashable] = []
    for received, calls in zip(forms.received, forms.calls, strict=True):
        found.append((received, before))
        before |= {treated[fqn] for fqn, *_ in calls}
    return found
