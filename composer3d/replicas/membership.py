"""Membership of groups of ranks, step by step: groups that take part, what they voted, and who has the state.

No sockets and no clock: whoever carries the messages tells what came, and sends what is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer3d.replicas.policy import ReplicaPolicy

__all__ = ["NOTHING", "Membership", "Place"]

NOTHING = -1  # step of a group that has no state yet


class Place(NamedTuple):
    """A rank of a group."""

    group: int
    rank: int


Messages = list[tuple[Place, Mapping[str, Any]]]


@dataclass(kw_only=True, eq=False)
class _Group:
    """What is known of a group that is there.

    Args:
        attempt: How often the group was started before: an older one is none of the run any more.
        ranks: Those that have come.
        asks: The step that each rank wants to take part in, whether it was asked to stop, and whether groups may come.
        votes: By rank, whether the exchange of the step succeeded.
    """

    attempt: int
    ranks: set[int] = field(default_factory=set)
    asks: dict[int, tuple[int, bool, bool]] = field(default_factory=dict)
    votes: dict[int, bool] = field(default_factory=dict)


class Membership:
    """Decides which groups take part in a step, and whether the step counts.

    Every rank asks to take part in its next step (`ask`). Once all ranks of all groups that took part in the last one
    have asked, those groups and the ones that wait form a new *epoch*, unless they are those of the last: all of them
    are told its members, the step, and the groups that need the state, with one that has it; spare ones are told that
    they are, and ask again without a state. After the exchange every
    rank votes; a step counts where every rank of every group that is left has all of it. So no group takes a step that
    another one does not.

    Args:
        policy: Of the run.
        num_groups: Of the run, spares included.
        num_ranks: Of each group.

    Attributes:
        members: Groups of the epoch, those lost since included.
        epoch: Its number.
        step: The step that it makes.
        num_committed: Steps that counted.
        reasons: Why groups were lost, by group, the last of each.
    """

    def __init__(self, policy: ReplicaPolicy, *, num_groups: int, num_ranks: int) -> None:
        self._policy, self._num_groups, self._num_ranks = policy, num_groups, num_ranks
        self._groups: dict[int, _Group] = {}
        self._wanted = dict.fromkeys(range(num_groups), 0)  # attempts that are the run's
        self._setup: str | None = None
        self._is_broken = self._has_begun = False
        self._done: set[int] = set()
        self._taking: set[int] = set()  # groups of the epoch that have been there ever since
        self.members: tuple[int, ...] = ()
        self.epoch, self.step, self.num_committed = 0, NOTHING, 0
        self.committed_by: dict[int, int] = {}
        self.reasons: dict[int, str] = {}

    # ---- what is there -----------------------------------------------------------------------------------------------

    @property
    def left(self) -> tuple[int, ...]:
        """Groups of the epoch that are still there."""
        return tuple(group for group in self.members if group in self._taking and group not in self._done)

    @property
    def has_begun(self) -> bool:
        """Whether a first epoch was formed: groups that come later are given the state by others."""
        return self._has_begun

    @property
    def is_finished(self) -> bool:
        """Whether groups have left at the end of the run, and nobody is left who trains."""
        return bool(self._done) and not self.left

    @property
    def is_lost(self) -> bool:
        """Whether every group that had the state is gone."""
        return self._has_begun and not self.left and not self._done

    def waited_for(self) -> tuple[int, ...]:
        """Return the groups that others wait for: of the epoch, and neither asking nor voting as a whole."""
        left = self.left
        groups = [self._groups[group] for group in left]
        if any(each.votes for each in groups):
            return tuple(group for group in left if len(self._groups[group].votes) < self._num_ranks)
        if any(each.asks for each in groups):
            return tuple(group for group in left if len(self._groups[group].asks) < self._num_ranks)
        return ()

    def is_short(self) -> bool:
        """Return whether groups that have asked wait for more of them to come."""
        ready = [group for group in self._groups if self._is_ready(group)]
        return bool(ready) and not self.waited_for() and (not self._has_begun or len(ready) < self._policy.minimum)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def expect(self, group: int, attempt: int) -> Messages:
        """Note that a group was started again: whoever comes of an older start is not let in."""
        self._wanted[group] = attempt
        known = self._groups.get(group)
        return self.lose(group, "it was started again") if known is not None and known.attempt != attempt else []

    def begin_again(self) -> None:
        """Forget everything but the attempts: the run begins again from what is on disk."""
        self._groups.clear()
        self._taking.clear()
        self.members, self._is_broken, self._has_begun, self._setup = (), False, False, None
        self.step = NOTHING

    def come(self, place: Place, *, attempt: int, setup: str) -> str | None:
        """Let a rank in; return why not, where it is refused.

        Args:
            place: Of the rank.
            attempt: How often its group was started before.
            setup: What all ranks of the run have in common.
        """
        if place.group not in self._wanted or not 0 <= place.rank < self._num_ranks:
            return f"the run has {self._num_groups} groups of {self._num_ranks} ranks, and none is {tuple(place)}"
        if attempt != self._wanted[place.group]:
            return (
                f"group {place.group} was started again since, and this process is of start {attempt + 1}, not "
                f"{self._wanted[place.group] + 1}"
            )
        if self._setup is None:
            self._setup = setup
        if setup != self._setup:
            return (
                f"group {place.group} runs another manifest, other plugins or versions than the groups that are there: "
                "start all of them alike"
            )
        known = self._groups.setdefault(place.group, _Group(attempt=attempt))
        if place.rank in known.ranks:
            return f"rank {place.rank} of group {place.group} is there already: do two jobs have one name?"
        known.ranks.add(place.rank)
        return None

    def ask(self, place: Place, *, step: int, stop: bool, admits: bool = True) -> Messages:
        """Note that a rank wants to take part in a step.

        Args:
            place: Of the rank.
            step: NOTHING where it has no state.
            stop: Whether it was asked to stop.
            admits: Whether groups that lack the state may come now.
        """
        self._groups[place.group].asks[place.rank] = (step, stop, admits)
        return self._decide()

    def vote(self, place: Place, *, ok: bool) -> Messages:
        """Note whether a rank has all of a step."""
        self._groups[place.group].votes[place.rank] = ok
        return self._decide()

    def leave(self, place: Place) -> Messages:
        """Note that a rank has come to the end of the run."""
        self._done.add(place.group)
        return self._decide()

    def lose(self, group: int, reason: str) -> Messages:
        """Note that a group is gone, or has to go: all of its ranks are told, and the others that it is."""
        known = self._groups.pop(group, None)
        if known is None:
            return []
        told: Messages = []
        if group not in self._done:
            self.reasons[group] = reason
            told = [(Place(group, rank), {"out": reason}) for rank in sorted(known.ranks)]
            if group in self._taking:
                self._taking.remove(group)
                self._is_broken = True
                told += [(place, {"broken": self.epoch}) for place in self._places(self.left)]
        return told + self._decide()

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self) -> Messages:
        return [*self._commit(), *self._form()]

    def _commit(self) -> Messages:
        """Tell those who voted whether the step counts, once all who are left have."""
        groups = {group: self._groups[group] for group in self.left}
        if not groups or any(len(each.votes) < self._num_ranks for each in groups.values()):
            return []
        ok = all(vote for each in groups.values() for vote in each.votes.values())
        for each in groups.values():
            each.votes.clear()
        self._is_broken |= not ok
        if ok:
            self.num_committed += 1
            self.committed_by |= dict.fromkeys(groups, self.num_committed)
        return [(place, {"commit": ok}) for place in self._places(groups)]

    def _form(self) -> Messages:
        """Tell those who asked who takes part in the step, once all who are left have asked."""
        left = self.left
        ready = [group for group in sorted(self._groups) if self._is_ready(group)]
        if not set(left) <= set(ready) or not ready or (self._has_begun and not left):
            return []
        if not self._has_begun and len(ready) < self._num_groups:
            return []
        return self.form(ready)

    def form(self, ready: list[int] | None = None) -> Messages:
        """Form an epoch of the groups that are ready, those of the last one first.

        Args:
            ready: Groups all of whose ranks have asked; by default found here, for a run that begins without the rest.
        """
        ready = [group for group in sorted(self._groups) if self._is_ready(group)] if ready is None else ready
        left = self.left if self._has_begun else ()
        most = self._num_groups - self._policy.spares
        admits = all(admits for group in left for _, _, admits in self._groups[group].asks.values())
        new = [*left, *(group for group in ready if admits and group not in left)][: max(most, len(left))]
        if len(new) < self._policy.minimum or not new:
            return []
        members = tuple(sorted(new))
        steps = {group: {step for step, *_ in self._groups[group].asks.values()} for group in members}
        self.step = max(step for each in steps.values() for step in each)
        behind = [group for group in members if steps[group] != {self.step}]
        if self._is_broken or members != self.members or not self._has_begun:
            self.epoch += 1
        stop = any(stop for group in members for _, stop, _ in self._groups[group].asks.values())
        self.members, self._taking = members, set(members)
        self._is_broken, self._has_begun = False, True
        answer = {
            "epoch": self.epoch,
            "members": list(members),
            "step": self.step,
            "source": next(group for group in (*left, *members) if group not in behind),
            "behind": behind,
            "stop": stop,
        }
        waiting = [group for group in ready if group not in members and self._has_state(group)]
        for group in (*members, *waiting):
            self._groups[group].asks.clear()
        told: Messages = [(place, {"spare": True}) for place in self._places(tuple(waiting))]
        return [(place, answer) for place in self._places(members)] + told

    def _has_state(self, group: int) -> bool:
        """Return whether a group that has asked began with a state, which is old once others go on without it."""
        return any(step != NOTHING for step, *_ in self._groups[group].asks.values())

    def _is_ready(self, group: int) -> bool:
        return len(self._groups[group].asks) == self._num_ranks and group not in self._done

    def _places(self, groups: Mapping[int, Any] | tuple[int, ...]) -> Iterator[Place]:
        for group in groups:
            yield from (Place(group, rank) for rank in sorted(self._groups[group].ranks))
