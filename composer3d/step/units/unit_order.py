"""Order of the units that ranks gather and reduce, agreed before a collective that differs from the last step's.

Sharded data parallelism gathers a unit where its module is called. Ranks that call other modules, or call them in
another order, meet in collectives of different units: they exchange each other's parameters, or sizes that gloo aborts
at, or wait for ever. Ranks that repeat the order of the last step need no word. A rank about to deviate from it first
counts itself at this place in the store, and goes on when all ranks of its stage have. Those that do not come, since
they wait in a collective of the usual order, answer through a thread what they have called.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError

if TYPE_CHECKING:
    from composer3d.mesh import Layout
    from composer3d.observation.rank_questions import RankQuestions

__all__ = ["UnitOrder"]

END = -1  # after the last unit of a backward
_ASK_S, _ANSWER_S = 0.2, 1.5
_SHORTEST_S, _LONGEST_S = 0.0002, 0.02
_ADVICE = (
    "a unit of sharded data parallelism must be called on every rank, in the same order. Write units = [], or the "
    "patterns of modules that every rank calls, as the layer around experts, in the manifest's table"
)


class UnitOrder:
    """Order of units, by step.

    Args:
        questions: Of this rank to the others.
        layout: Gives ranks their coordinates.
        rank: Global rank of this process.
        ranks: Those that hold shards of the same parameters, this one included.
        describe: Returns the phrase for a unit's collective: `gathers layers.3`.
        timeout_s: How long to wait for ranks that have not come.

    Collectives: none. A step that repeats the last one: no messages; else two messages of each rank to the store for
    each place that differs, as for each of the first step.
    """

    def __init__(
        self,
        *,
        questions: RankQuestions,
        layout: Layout,
        rank: int,
        ranks: Sequence[int],
        describe: Callable[[int], str],
        timeout_s: float,
    ) -> None:
        self._questions, self._layout, self._rank, self._ranks = questions, layout, rank, tuple(ranks)
        self._describe, self._timeout_s = describe, timeout_s
        self._others = tuple(other for other in ranks if other != rank)
        self._expected: dict[str, list[int]] = {}
        self._usual: list[int] = []
        self._sent: list[int] = []
        self._pending: tuple[int, ...] = ()
        self._announced: list[str] = []
        self._round, self._step, self._kind = 0, 0, ""
        self._is_open = False
        questions.state = self._state

    def begin(self, step: int, kind: str = "step") -> None:
        """Begin a step, or another pass over the model."""
        self.close()
        if self._announced and self._rank == min(self._ranks):
            self._questions.forget(self._announced)
        self._announced = []
        self._round, self._step, self._kind, self._is_open = self._round + 1, step, kind, True
        self._usual, self._sent = self._expected.get(kind, []), []

    def close(self) -> None:
        """End the step: what follows is compared with nothing."""
        if self._is_open:
            self._is_open = False
            self._expected[self._kind] = self._sent if self._sent[-1:] == [END] else []

    def passes(self, item: int) -> None:
        """Return when a collective may begin.

        Args:
            item: Of the unit and its collective, the same number on all ranks; END after a backward.

        Raises:
            StepError: Another rank begins one of another unit, or has no more to begin.
        """
        if not self._is_open:
            return
        place = len(self._sent)
        if place >= len(self._usual) or self._usual[place] != item:
            self._agree(place, item)
        self._sent.append(item)

    def _state(self) -> dict[str, Any]:
        return {"round": self._round, "items": [*self._sent, *self._pending]}

    def _agree(self, place: int, item: int) -> None:
        self._pending = (item,)
        key = f"units/{self._round}/{place}/{item}"
        self._announced.append(key)
        asks = self._questions.count(key, 1) == 1  # one of those that wait at a place
        began, pause, wait = time.monotonic(), _SHORTEST_S, _ASK_S
        while self._questions.count(key) < len(self._ranks):
            waited = time.monotonic() - began
            if self._questions.message is not None:
                raise StepError(self._questions.message)
            if asks and waited > wait:
                if self._all_are_here(place, item):
                    self._questions.count(key, len(self._ranks))
                wait = 2 * waited
            if waited > self._timeout_s:
                raise RuntimeError(f"timed out waiting {waited:.0f} s for ranks to call the same module")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_S)
        self._pending = ()

    def _all_are_here(self, place: int, item: int) -> bool:
        """Return whether all ranks begin the same collective at a place; some may not have come to it yet.

        A rank that has not made its `UnitOrder` yet answers nothing.

        Raises:
            StepError: Some begin another one.
        """
        answers = self._questions.ask(self._others, _ANSWER_S)
        there = {
            rank: answer["items"][place]
            for rank, answer in answers.items()
            if answer and answer["round"] == self._round and len(answer["items"]) > place
        }
        if any(other != item for other in there.values()):
            text = self._text({self._rank: item, **there})
            raise StepError(self._questions.publish(text, self._others))
        return len(there) == len(self._others)

    def _text(self, items: Mapping[int, int]) -> str:
        usual = Counter(items[rank] for rank in sorted(items)).most_common(1)[0][0]
        odd = min(rank for rank, item in items.items() if item != usual)
        other = min(rank for rank, item in items.items() if item == usual)
        return (
            f"ranks call other modules in {self._kind} {self._step}: {self._layout.who(odd)} "
            f"{self._describe(items[odd])}, where rank {other} {self._describe(usual)}; {_ADVICE}"
        )
