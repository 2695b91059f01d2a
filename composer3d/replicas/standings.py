"""Statements of ranks to a server that takes over, until it decides on the step in flight."""

from __future__ import annotations

from composer3d.replicas.membership import Place
from composer3d.replicas.resumption import Standing

__all__ = ["Standings"]


class Standings:
    """Standings of the ranks that have come.

    Args:
        num_groups: Number of groups.
        num_ranks: Ranks per group.

    Attributes:
        groups: By group and rank.
        attempts: Of each group's start.
        fresh: Ranks that had been told nothing by any server.
        setup: Equal on all of them.
    """

    def __init__(self, num_groups: int, num_ranks: int) -> None:
        self.num_groups, self.num_ranks = num_groups, num_ranks
        self.groups: dict[int, dict[int, Standing]] = {}
        self.attempts: dict[int, int] = {}
        self.fresh: set[Place] = set()
        self.setup: str | None = None

    def come(self, place: Place, *, attempt: int, setup: str, standing: Standing | None) -> str | None:
        """Note a rank; return the reason if it is refused.

        Args:
            place: Of the rank.
            attempt: How often its group was started before.
            setup: Value that must be equal on all ranks of the run.
            standing: What it knows; None where it was told nothing yet.
        """
        if not 0 <= place.group < self.num_groups or not 0 <= place.rank < self.num_ranks:
            return f"the run has {self.num_groups} groups of {self.num_ranks} ranks, and none is {tuple(place)}"
        if self.setup is not None and setup != self.setup:
            return (
                f"group {place.group} runs another manifest, other plugins or versions than the groups that are there"
            )
        if self.attempts.setdefault(place.group, attempt) != attempt:
            return f"group {place.group} was started again since, and this process is of start {attempt + 1}"
        self.setup = setup
        ranks = self.groups.setdefault(place.group, {})
        ranks[place.rank] = Standing(has_state=False) if standing is None else standing
        if standing is None:
            self.fresh.add(place)
        return None

    def leave(self, place: Place) -> None:
        """Forget a rank whose connection has ended; it may come again."""
        self.groups[place.group].pop(place.rank)
        self.fresh.discard(place)
        if not self.groups[place.group]:
            self.groups.pop(place.group)
            self.attempts.pop(place.group)

    def is_whole(self, group: int) -> bool:
        """Return whether all ranks of a group have come."""
        return len(self.groups.get(group, ())) == self.num_ranks

    def with_state(self) -> set[int]:
        """Return the groups of which some rank states that it has made steps, or began them."""
        return {group for group, ranks in self.groups.items() if any(each.round for each in ranks.values())}
