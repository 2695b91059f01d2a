"""Hang report: one sentence that names the ranks missing from a collective, from every rank's last collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from composer3d.mesh import Layout, Role

__all__ = ["Account", "RecordedCollective", "Fault", "Names", "diagnose", "find_fault", "told_act"]

_SHOWN = 8  # ranks whose last act is told
# Ranks pass inputs of the same size to these; to others each may pass its own.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")


class Names(Protocol):
    """Names of ranks for messages; a `Layout` provides them."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def who(self, rank: int) -> str:
        """Return a rank with its coordinates."""


@dataclass(frozen=True, kw_only=True)
class RecordedCollective:
    """One collective of one rank.

    Args:
        axis: Of its process group.
        ranks: Of its process group.
        number: Sequence number within its group; ranks that run the same collectives have the same numbers.
        op: The operation.
        sizes: Shapes of its inputs.
        time_ns: Time of the call, ns since 1970.
        dtypes: Of its inputs.
        backend: Backend that runs it: a group may have one for each device type, and each counts its own.
        group: Name of the group among groups of the same ranks; empty for the axis' own, and for the world's.
        pending: Whether it has not completed, by its backend's record.
        issuer: The plugin that issued it, or composer3d; empty for the owner of its axis, and for a line of a loop or a
            model; None where the record does not tell.
        caller: File, line and function that called it, of a plugin, a loop or a model.
    """

    axis: str
    ranks: tuple[int, ...]
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    time_ns: int
    dtypes: tuple[str, ...] = ()
    backend: str = ""
    group: str = ""
    pending: bool = False
    issuer: str | None = None
    caller: str = ""

    def __str__(self) -> str:
        return f"{self.op} of {', '.join(str(list(size)) for size in self.sizes) or 'nothing'}"

    @property
    def essence(self) -> tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Operation, dtypes and shapes, which ranks must have in common."""
        return self.op, self.dtypes, self.sizes if self.op.startswith(_EQUAL_SIZES) else ()

    @property
    def line(self) -> tuple[tuple[int, ...], str, str]:
        """Key of its sequence numbers: one process group, one backend."""
        return self.ranks, self.group or self.axis, self.backend


@dataclass(frozen=True, kw_only=True)
class Account:
    """A rank's report of its own state.

    Args:
        rank: Global rank that reports.
        step: Its last step, None before the first.
        inside: Whether a step is open.
        spans: Open spans, outermost first, without the step's own.
        place: The innermost line of the user's code.
        own: Whether the last collective is composer3d's own and no plugin's; None where it has completed.
        collectives: The last ones, oldest first.
        exchanges: Whether it waits for a message of a neighbouring pipeline stage.
        has_closed: Whether its loop has ended, and closed the run.
    """

    rank: int
    step: int | None
    inside: bool
    spans: tuple[str, ...]
    place: str
    own: bool | None
    collectives: tuple[RecordedCollective, ...]
    exchanges: bool = False
    has_closed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the account as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Account:
        """Return the account that `to_json` wrote."""
        rows = tuple(
            RecordedCollective(
                **row
                | {key: tuple(row[key]) for key in ("ranks", "dtypes") if key in row}
                | {"sizes": tuple(map(tuple, row["sizes"]))}
            )
            for row in content["collectives"]
        )
        return cls(**{**content, "spans": tuple(content["spans"]), "collectives": rows})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The collective at which ranks diverged.

    Args:
        kind: `mismatch` where ranks ran different ones, `missing` where some did not reach it.
        collective: It, or what most ranks ran.
        odd: The ranks that ran another, or that the others waited for.
        text: One sentence, with the collective's place.
    """

    kind: Literal["mismatch", "missing"]
    collective: RecordedCollective
    odd: tuple[int, ...]
    text: str


def diagnose(accounts: Sequence[Account], *, layout: Layout, owners: Mapping[str, str], reason: str) -> str:
    """Return the report of a failed collective: the ranks missing from it or in another one, and each rank's last act.

    Args:
        accounts: Of the ranks that answered, the one that failed first at the front.
        layout: Gives ranks their coordinates.
        owners: The plugin that owns an axis, by axis.
        reason: Message of the backend.
    """
    odd: tuple[int, ...] = ()
    lines = [f"a collective failed {_when(accounts[0])}: {reason}"]
    fault = find_fault(accounts, layout=layout, owners=owners)
    if fault is not None:
        odd = fault.odd
        lines.append(fault.text)
    elif accounts[0].exchanges:
        odd, line = _exchange(accounts, layout, owners)
        lines.append(line)
        behind = _behind(accounts, odd, layout, owners)
        if behind is not None:
            odd = (*behind.odd, *(rank for rank in odd if rank not in behind.odd))
            lines.append(behind.text)
    lines += _told(accounts, odd, layout, owners)
    return "\n".join(lines)


def find_fault(accounts: Sequence[Account], *, layout: Names, owners: Mapping[str, str]) -> Fault | None:
    """Find the collective at which ranks diverged; None if the accounts do not show it.

    Args:
        accounts: Of the ranks that answered, one that waits at the front.
        layout: Gives ranks their coordinates.
        owners: The plugin that owns an axis, by axis.
    """
    mismatch = _mismatch(accounts)
    found = mismatch or (None if accounts[0].exchanges else _missing(accounts))
    if found is None:
        return None
    collective, odd, here, text = found
    issuers = {rank: _issuer(ran, layout, owners, _own(ran, accounts)) for rank, ran in here.items()}
    # Where ranks ran those of several issuers, each is named with its rank.
    several = issuers if len(set(issuers.values())) > 1 else {}
    names = dict.fromkeys(issuer.partition(", ")[0] if several else issuer for issuer in issuers.values())
    return Fault(
        kind="missing" if mismatch is None else "mismatch",
        collective=collective,
        odd=odd,
        text=f"{_where(collective, ' and '.join(names))}: " + text(layout, several),
    )


def _own(collective: RecordedCollective, accounts: Sequence[Account]) -> bool | None:
    """Return whether a collective is composer3d's own, of a rank that is in it; None where none is."""
    return next((account.own for account in accounts if account.collectives[-1:] == (collective,)), None)


def _exchange(accounts: Sequence[Account], layout: Layout, owners: Mapping[str, str]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that a pipeline stage waits for: ranks of its pipeline not exchanging, or not answering."""
    first, by_rank = accounts[0], {account.rank: account for account in accounts}
    (axis,) = layout.names(Role.STAGE)
    others = [rank for rank in layout.group(first.rank, axis) if rank != first.rank]
    odd = tuple(rank for rank in others if rank not in by_rank or not by_rank[rank].exchanges)
    waiting = _ranks(rank for rank in layout.group(first.rank, axis) if rank not in odd)
    what = f"a send or receive between stages along {axis} ({_ranks([first.rank, *others])}; {owners.get(axis, axis)})"
    if not odd:
        return odd, f"{what}: all of them wait for a neighbour; their schedules do not fit each other"
    return odd, f"{what}: {' and '.join(map(layout.who, odd[:_SHOWN]))} did not come to it, and {waiting} waited"


def _behind(accounts: Sequence[Account], odd: Sequence[int], layout: Layout, owners: Mapping[str, str]) -> Fault | None:
    """Find the pending collective of a rank for which a stage waits."""
    for account in accounts:
        if account.rank in odd and account.own is not None:
            others = [other for other in accounts if other is not account]
            return find_fault([account, *others], layout=layout, owners=owners)
    return None


def _when(account: Account) -> str:
    if account.step is None:
        return "before the first step"
    return f"in step {account.step}" if account.inside else f"after step {account.step}"


def _where(collective: RecordedCollective, issuers: str) -> str:
    ranks = " and ".join(map(str, collective.ranks)) if len(collective.ranks) <= 4 else f"{len(collective.ranks)} ranks"
    return (
        f"collective {collective.number} over {collective.axis} "
        f"({'' if ' ranks' in ranks else 'ranks '}{ranks}; {issuers})"
    )


def _issuer(collective: RecordedCollective, layout: Names, owners: Mapping[str, str], own: bool | None) -> str:
    """Name who issued it, with the line of a plugin, a loop or a model.

    Where its record does not tell, that is the owner of its axis; composer3d's own run over all ranks, which may be one
    axis.
    """
    if collective.issuer is not None:
        name = collective.issuer or ("" if collective.caller else owners.get(collective.axis, "composer3d"))
        return ", ".join(filter(None, (name, collective.caller)))
    if own or collective.axis not in owners:
        return "composer3d"
    shared = own is None and len(collective.ranks) == layout.world_size
    return owners[collective.axis] + (" or composer3d" if shared else "")


def _by_line(accounts: Sequence[Account]) -> dict[Any, dict[int, dict[int, RecordedCollective]]]:
    """Return collectives by group and backend, rank and number."""
    groups: dict[Any, dict[int, dict[int, RecordedCollective]]] = {}
    for account in accounts:
        for collective in account.collectives:
            groups.setdefault(collective.line, {}).setdefault(account.rank, {})[collective.number] = collective
    return groups


def _mismatch(accounts: Sequence[Account]) -> Any:
    """Find the earliest collective of any group that ranks ran differently, and what each of them ran."""
    found: list[tuple[RecordedCollective, dict[int, RecordedCollective]]] = []
    for rows in _by_line(accounts).values():
        for number in sorted(set.intersection(*(set(row) for row in rows.values()))):
            here = {rank: rows[rank][number] for rank in sorted(rows)}
            if len({collective.essence for collective in here.values()}) > 1:
                found.append((min(here.values(), key=lambda collective: collective.time_ns), here))
                break
    if not found:
        return None
    collective, here = min(found, key=lambda pair: pair[0].time_ns)
    usual = Counter(other.essence for other in here.values()).most_common(1)[0][0]
    odd = tuple(rank for rank, other in here.items() if other.essence != usual)
    told = next(other for other in here.values() if other.essence == usual)

    def text(layout: Names, issuers: Mapping[int, str]) -> str:
        alike = any(str(here[rank]) == str(told) for rank in odd)  # but for their dtypes

        def act(rank: int) -> str:
            ran = f"{here[rank]} in {', '.join(here[rank].dtypes)}" if alike else str(here[rank])
            return f"{ran} ({issuers[rank]})" if issuers else ran

        others = [rank for rank in here if rank not in odd]
        shown = ", ".join(f"{layout.who(rank)} ran {act(rank)}" for rank in odd[:_SHOWN])
        return f"{shown}, while {_ranks(others)} ran {act(others[0])}"

    return collective, odd, here, text


def _missing(accounts: Sequence[Account]) -> Any:
    """Find the pending collective and the ranks that have not run it, along the chain of waits from the failed rank."""
    by_rank, groups = {account.rank: account for account in accounts}, _by_line(accounts)
    rank, seen, found = accounts[0].rank, set(), None
    while rank in by_rank and rank not in seen and by_rank[rank].collectives:
        seen.add(rank)
        last = _waited_in(by_rank[rank])
        rows = groups[last.line]
        behind = [other for other in last.ranks if other in by_rank and max(rows.get(other, (0,))) < last.number]
        odd = tuple(behind or [other for other in last.ranks if other not in by_rank])
        if not odd:
            break
        found = (last, odd)
        rank = odd[0]
    if found is None:
        return None
    last, odd = found
    late = all(rank in by_rank for rank in odd)

    def text(layout: Names, issuers: Mapping[int, str]) -> str:
        who = " and ".join(layout.who(rank) for rank in odd[:_SHOWN])
        waits = _ranks(rank for rank in last.ranks if rank not in odd and rank in by_rank)
        return f"{who} did not {'run' if late else 'come through'} {last}, in which {waits} waited"

    return last, odd, {rank: last}, text


def _waited_in(account: Account) -> RecordedCollective:
    """Return the collective that a rank waits in: NCCL runs behind the calls, so that it is the first pending one."""
    behind = (found for found in account.collectives if found.pending and found.backend == "nccl")
    return next(behind, account.collectives[-1])


def _ranks(ranks: Iterable[int]) -> str:
    shown = [*ranks]
    names = " and ".join(f"rank {rank}" for rank in shown[:4])
    return names + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _told(accounts: Sequence[Account], odd: Sequence[int], layout: Names, owners: Mapping[str, str]) -> Iterable[str]:
    """Yield a line for each rank: those that differ first."""
    by_rank = {account.rank: account for account in accounts}
    order = [*odd, *(rank for rank in range(layout.world_size) if rank not in odd)]
    for rank in order[:_SHOWN]:
        account = by_rank.get(rank)
        yield f"{layout.who(rank)}: " + (
            "gave no answer: it ended, or hangs" if account is None else told_act(account, layout, owners)
        )
    if len(order) > _SHOWN:
        yield f"and {len(order) - _SHOWN} more ranks"


def told_act(account: Account, layout: Names, owners: Mapping[str, str]) -> str:
    """Return a phrase for what a rank did last."""
    parts = [f"{_when(account)}"]
    if account.spans:
        parts.append("in " + " in ".join(reversed(account.spans)))
    if account.place:
        parts.append(f"at {account.place}")
    if account.collectives:
        last = account.collectives[-1]
        parts.append(f"last collective {last} over {last.axis} ({_issuer(last, layout, owners, account.own)})")
    if account.has_closed:
        parts.append("and closed its run: its loop had fewer steps than others, or skipped one")
    return ", ".join(parts)
