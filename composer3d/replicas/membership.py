"""Membership of replica groups, step by step: members, votes, and the group that has the state.

A state machine without sockets or clock: its caller passes received messages, and sends those that it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer3d.replicas.policy import ReplicaPolicy
from composer3d.replicas.resumption import Resolution, Settled

__all__ = ["NOTHING", "Membership", "Place"]

NOTHING = -1  # step of a group that has no state yet


class Place(NamedTuple):
    """A rank of a group."""

    group: int
    rank: int


Messages = list[tuple[Place, Mapping[str, Any]]]


@dataclass(kw_only=True, eq=False)
class _Group:
    """State of a connected group.

    Args:
        attempt: Number of earlier starts of the group; messages of an older start are refused.
        ranks: Ranks that have connected.
        asks: By rank, its next step, whether it was requested to stop, and whether groups may join.
        votes: By rank, whether the exchange of the step succeeded.
    """

    attempt: int
    ranks: set[int] = field(default_factory=set)
    asks: dict[int, tuple[int, bool, bool]] = field(default_factory=dict)
    votes: dict[int, bool] = field(default_factory=dict)


class Membership:
    """Decides which groups take part in a step, and whether the step is committed.

    Every rank asks to take part in its next step (`ask`). Once all ranks of all groups that took part in the last one
    have asked, those groups and the ones that wait form a new *epoch*, unless they are those of the last: all of them
    are told its members, the step, and the groups that need the state, with one that has it; spare ones are told that
    they are, and ask again without a state. After the exchange every
    rank votes; a step counts where every rank of every group that is left has all of it. So no group takes a step that
    another one does not.

    Args:
        policy: Policy of the run.
        num_groups: Number of groups, spares included.
        num_ranks: Number of ranks per group.

    Attributes:
        members: Groups of the epoch, including those lost since.
        epoch: Its number.
        round: Number of answered requests of all ranks together; of one epoch there are several.
        step: Step of the epoch.
        num_committed: Number of committed steps.
        reasons: Reason of each group's last loss.
        resolution: What was decided when this server took over; None in the run's first one.
    """

    def __init__(self, policy: ReplicaPolicy, *, num_groups: int, num_ranks: int) -> None:
        self._policy, self._num_groups, self._num_ranks = policy, num_groups, num_ranks
        self._groups: dict[int, _Group] = {}
        self._wanted = dict.fromkeys(range(num_groups), 0)  # current attempt of every group
        self._setup: str | None = None
        self._is_broken = self._has_begun = False
        self._done: set[int] = set()
        self._taking: set[int] = set()  # groups of the epoch without an interruption
        self.members: tuple[int, ...] = ()
        self.epoch, self.round, self.step, self.num_committed = 0, 0, NOTHING, 0
        self.resolution: Resolution | None = None
        self.committed_by: dict[int, int] = {}
        self.reasons: dict[int, str] = {}

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> tuple[int, ...]:
        """Groups of the epoch that are not lost."""
        return tuple(group for group in self.members if group in self._taking and group not in self._done)

    @property
    def has_begun(self) -> bool:
        """Whether a first epoch was formed: groups that join later receive the state from a member."""
        return self._has_begun

    @property
    def is_finished(self) -> bool:
        """Whether groups have finished the run and no training group remains."""
        return bool(self._done) and not self.left

    @property
    def is_lost(self) -> bool:
        """Whether every group that had the state is lost."""
        return self._has_begun and not self.left and not self._done

    def waited_for(self) -> tuple[int, ...]:
        """Return the groups that block the epoch: members whose ranks have neither all asked nor all voted."""
        left = self.left
        groups = [self._groups[group] for group in left]
        if any(each.votes for each in groups):
            return tuple(group for group in left if len(self._groups[group].votes) < self._num_ranks)
        if any(each.asks for each in groups):
            return tuple(group for group in left if len(self._groups[group].asks) < self._num_ranks)
        return ()

    def is_short(self) -> bool:
        """Return whether groups that have asked wait for more groups to connect."""
        ready = [group for group in self._groups if self._is_ready(group)]
        return bool(ready) and not self.waited_for() and (not self._has_begun or len(ready) < self._policy.minimum)

    # ---- events ------------------------------------------------------------------------------------------------------

    def expect(self, group: int, attempt: int) -> Messages:
        """Record a restart of a group: ranks of an older start are refused."""
        self._wanted[group] = attempt
        known = self._groups.get(group)
        return self.lose(group, "it was started again") if known is not None and known.attempt != attempt else []

    def resume(self, settled: Settled, ranks: Mapping[Place, int], *, setup: str | None) -> Messages:
        """Continue the membership of a server that was lost, in place of one that has begun nothing.

        Args:
            settled: What was decided on the round in flight.
            ranks: Ranks that have come, with the attempt of their group; those of groups that are out are not let in.
            setup: Theirs.

        Returns:
            The decision, for every rank that is let in.
        """
        resolution = settled.resolution
        told: Messages = []
        for place, attempt in ranks.items():
            if place.group in settled.out:
                continue
            self._groups.setdefault(place.group, _Group(attempt=attempt)).ranks.add(place.rank)
            told.append((place, {"resumed": resolution.to_json()}))
        self.reasons |= settled.out
        self._setup = setup
        self.resolution, self.round, self.epoch = resolution, resolution.round, settled.epoch
        # The connections of that epoch are those of groups that may be lost: the next step has a new one.
        self._has_begun = self._is_broken = settled.has_begun
        if settled.has_begun:
            self.members, self._taking = resolution.groups, set(resolution.groups)
        self.num_committed += resolution.commit
        self.committed_by |= dict.fromkeys(resolution.groups if resolution.commit else (), self.num_committed)
        return told

    def begin_again(self) -> None:
        """Reset everything but the attempts: the run restarts from its checkpoint."""
        self._groups.clear()
        self._taking.clear()
        self.members, self._is_broken, self._has_begun, self._setup = (), False, False, None
        self.step = NOTHING

    def come(self, place: Place, *, attempt: int, setup: str) -> str | None:
        """Register a rank; return the reason if it is refused.

        Args:
            place: Of the rank.
            attempt: How often its group was started before.
            setup: Value that must be equal on all ranks of the run.
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
        """Record a rank's request to take part in a step.

        A group that comes with the state of the run's beginning, while others have begun without it, is told that it is
        spare: it asks again without a state.

        Args:
            place: Of the rank.
            step: Next step; NOTHING without a state.
            stop: Whether it was requested to stop.
            admits: Whether groups without the state may join now.
        """
        if self._has_begun and step != NOTHING and place.group not in self.members:
            return [(place, {"spare": True})]
        self._groups[place.group].asks[place.rank] = (step, stop, admits)
        return self._decide()

    def vote(self, place: Place, *, ok: bool) -> Messages:
        """Record a rank's vote on whether its exchange of the step is complete."""
        self._groups[place.group].votes[place.rank] = ok
        return self._decide()

    def leave(self, place: Place) -> Messages:
        """Record that a rank has reached the end of the run."""
        self._done.add(place.group)
        return self._decide()

    def lose(self, group: int, reason: str) -> Messages:
        """Record the loss of a group, and notify its ranks and all others."""
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
        """Answer the votes once all remaining ranks have voted: whether the step is committed."""
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
        """Answer the requests once all remaining ranks have asked: the members of the step."""
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
        whole = [step for each in steps.values() if NOTHING not in each and len(each) == 1 for step in each]
        if not whole:  # who had the state was lost while they received it
            return [each for group in members for each in self.lose(group, "no group is left that has the state")]
        self.step = max(whole)
        behind = [group for group in members if steps[group] != {self.step}]
        if self._is_broken or members != self.members or not self._has_begun:
            self.epoch += 1
        stop = any(stop for group in members for _, stop, _ in self._groups[group].asks.values())
        self.members, self._taking = members, set(members)
        self._is_broken, self._has_begun = False, True
        self.round += 1
        answer = {
            "epoch": self.epoch,
            "round": self.round,
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
        """Return whether a group connected with a state; it is outdated once other groups have continued."""
        return any(step != NOTHING for step, *_ in self._groups[group].asks.values())

    def _is_ready(self, group: int) -> bool:
        return len(self._groups[group].asks) == self._num_ranks and group not in self._done

    def _places(self, groups: Mapping[int, Any] | tuple[int, ...]) -> Iterator[Place]:
        for group in groups:
            yield from (Place(group, rank) for rank in sorted(self._groups[group].ranks))
