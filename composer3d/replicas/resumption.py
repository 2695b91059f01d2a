"""The step in flight where another server takes the membership over: what ranks know of it, and what is decided.

Functions of values, without sockets or clock. A server that is lost takes with it who was told what; every rank that is
left states its last round and the answers that it was given (`Standing`), and one rule over all of them says whether
the round counts (`settle`). A round counts exactly where some rank was told so: then all have voted that their exchange
is complete, hence all hold the averaged gradients. Otherwise nobody has made the step, and it is done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Resolution", "Settled", "Standing", "settle"]


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The decision of a server that took over on the round in flight.

    Args:
        term: Of the server; a later one has a larger term.
        round: Last round that a rank had been told.
        commit: Whether that round counts.
        groups: Groups whose ranks then had the same state: that after this round.
    """

    term: int
    round: int
    commit: bool
    groups: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any] | None) -> Resolution | None:
        """Return what `to_json` has made; None of None.

        Raises:
            KeyError: A key is missing.
            TypeError: A value is something else, as for ValueError.
        """
        if content is None:
            return None
        groups = tuple(int(group) for group in content["groups"])
        return cls(
            term=int(content["term"]), round=int(content["round"]), commit=bool(content["commit"]), groups=groups
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The last round of a rank, as it knows it.

    Args:
        round: Its number; 0 before the first.
        epoch: The epoch of that round.
        voted: The rank's vote; None where it has cast none.
        commit: The answer to it; None where it was given none.
        has_state: Whether the rank has a state: that of a run's beginning, or of the steps that it has made.
        resolution: Of the last server that took over.
    """

    round: int = 0
    epoch: int = 0
    voted: bool | None = None
    commit: bool | None = None
    has_state: bool = True
    resolution: Resolution | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Standing:
        """Return what `to_json` has made.

        Raises:
            KeyError: A key is missing.
            TypeError: A value is something else, as for ValueError.
        """
        flags = {name: None if content[name] is None else bool(content[name]) for name in ("voted", "commit")}
        return cls(
            round=int(content["round"]),
            epoch=int(content["epoch"]),
            has_state=bool(content["has_state"]),
            resolution=Resolution.from_json(content["resolution"]),
            **flags,
        )

    @property
    def is_new(self) -> bool:
        """Whether the rank has no state, nor was given one: it takes it from another group at any time."""
        return self.round == 0 and not self.has_state


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The groups after the loss of a server.

    Args:
        resolution: Told to all ranks.
        epoch: Largest number of an epoch that a rank knows.
        has_begun: Whether a first step was begun.
        out: Groups whose state is not that of the others, with the reason.
    """

    resolution: Resolution
    epoch: int
    has_begun: bool
    out: Mapping[int, str] = field(default_factory=dict)


def settle(
    standings: Mapping[int, Mapping[int, Standing]], *, term: int, num_ranks: int, has_begun: bool = False
) -> Settled:
    """Decide on the round in flight, and which groups have the state that follows.

    Args:
        standings: By group and rank, of those that have come to the new server.
        term: Of the new server.
        num_ranks: Ranks per group; a group of which some have not come is out.
        has_begun: Whether the run is known to have begun, though no rank that is left may have been told.
    """
    out: dict[int, str] = {}
    known: dict[int, list[Standing]] = {}
    every = [standing for ranks in standings.values() for standing in ranks.values()]
    last = max((each.resolution for each in every if each.resolution is not None), key=_term, default=None)
    for group, ranks in sorted(standings.items()):
        if len(ranks) < num_ranks and all(each.round == 0 for each in ranks.values()):
            continue  # it is being started
        if len(ranks) < num_ranks:
            missing = sorted(set(range(num_ranks)) - set(ranks))
            out[group] = f"ranks {missing} of it did not come to the machine that knows who takes part now"
            continue
        found = [_caught_up(group, standing, last) for standing in ranks.values()]
        if any(each is None for each in found):
            out[group] = "the others have gone on without it"
            continue
        known[group] = [each for each in found if each is not None]
    whole = [standing for ranks in known.values() for standing in ranks]
    newest = max((each.round for each in whole), default=0)
    commit = any(each.round == newest and bool(each.commit) for each in whole)
    holders = []
    for group, those in known.items():
        if all(each.is_new for each in those) or _is_outdated(those, newest, commit=commit, has_begun=has_begun):
            continue
        if all(_agrees(each, newest, commit=commit) for each in those):
            holders.append(group)
        else:
            out[group] = "its last step is not that of the others"
    return Settled(
        resolution=Resolution(term=term, round=newest, commit=commit, groups=tuple(holders)),
        epoch=max((each.epoch for each in every), default=0),
        has_begun=has_begun or newest > 0,
        out=out,
    )


def _term(resolution: Resolution) -> int:
    return resolution.term


def _caught_up(group: int, standing: Standing, last: Resolution | None) -> Standing | None:
    """Return a standing after the last server's decision, of which the rank may not have heard; None if it is out."""
    if last is None or standing.is_new or (standing.resolution is not None and standing.resolution.term == last.term):
        return standing
    if group not in last.groups or standing.round > last.round:
        return None
    return replace(
        standing, round=last.round, commit=last.commit, has_state=last.commit or standing.has_state, resolution=last
    )


def _is_outdated(ranks: list[Standing], newest: int, *, commit: bool, has_begun: bool) -> bool:
    """Return whether a group has the state of the run's beginning, while others have made steps."""
    is_initial = all(each.round == 0 for each in ranks)
    return is_initial and (newest > 1 or (newest == 1 and commit) or (newest == 0 and has_begun))


def _agrees(standing: Standing, newest: int, *, commit: bool) -> bool:
    """Return whether a rank has the state that follows the newest round."""
    if standing.round == newest:
        # One that voted otherwise, or not at all, while others were told that the step counts, was given up before.
        return not commit or bool(standing.commit) or (standing.commit is None and standing.voted is True)
    if commit:
        return False
    is_answered = standing.commit is not None or standing.round == 0
    return standing.is_new or (standing.round == newest - 1 and is_answered)
