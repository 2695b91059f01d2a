"""Hang report: one sentence that names the ranks missing from a collective, from every rank's last collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from composer3d.mesh import Layout, Role

__all__ = ["Account", "Collective", "Fault", "Names", "diagnose", "find_fault", "told_act"]

_SHOWN = 8  # ranks whose last act is told
# Ranks pass inputs of the same size to these; to others each may pass its own.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")


class Names(Protocol):
    """How ranks are called; a `Layout` is one."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def who(self, rank: int) -> str:
        """Return a rank with its coordinates."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of one rank.

    Args:
        axis: Of its process group.
        ranks: Of its process group.
        number: The how-manieth of its group it is; ranks that run the same collectives have the same numbers.
        op: The operation.
        sizes: Of its inputs.
        time_ns: When it was called.
        dtypes: Of its inputs.
        backend: That runs it: a group may have one for each type of device, and each counts its own.
        group: Which group of these ranks it is; empty for the axis' own, and for the world's.
        pending: It has not come back, as far as its backend says.
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

    def __str__(self) -> str:
        return f"{self.op} of {', '.join(str(list(size)) for size in self.sizes) or 'nothing'}"

    @property
    def essence(self) -> tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """What ranks must have in common."""
        return self.op, self.dtypes, self.sizes if self.op.startswith(_EQUAL_SIZES) else ()

    @property
    def line(self) -> tuple[tuple[int, ...], str, str]:
        """Where it is counted: in one process group, by one backend."""
        return self.ranks, self.group or self.axis, self.backend


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a rank tells of itself.

    Args:
        rank: The rank.
        step: Its last step, None before the first.
        inside: Whether it is in a step.
        spans: The open ones, outermost first, without the step's own.
        place: The innermost line of the user's code.
        own: Whether the last collective is composer3d's own and no plugin's; None where it has come back.
        collectives: Its last ones, oldest first.
        exchanges: Whether it waits for the stage before or after its own.
    """

    rank: int
    step: int | None
    inside: bool
    spans: tuple[str, ...]
    place: str
    own: bool | None
    collectives: tuple[Collective, ...]
    exchanges: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it in values that JSON holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Account:
        """Undo `to_json`."""
        rows = tuple(
            Collective(
                **row
                | {key: tuple(row[key]) for key in ("ranks", "dtypes") if key in row}
                | {"sizes": tuple(map(tuple, row["sizes"]))}
            )
            for row in content["collectives"]
        )
        return cls(**{**content, "spans": tuple(content["spans"]), "collectives": rows})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The collective at which ranks came apart.

    Args:
        kind: `mismatch` where ranks ran different ones, `missing` where some did not come to it.
        collective: It, or what most ranks ran.
        odd: The ranks that ran another, or that the others waited for.
        text: One sentence, with the collective's place.
    """

    kind: Literal["mismatch", "missing"]
    collective: Collective
    odd: tuple[int, ...]
    text: str


def diagnose(accounts: Sequence[Account], *, layout: Layout, owners: Mapping[str, str], reason: str) -> str:
    """Say which collective failed, who was missing or ran another, and what each rank did last.

    Args:
        accounts: Of the ranks that answered, the one that failed first at the front.
        layout: Gives ranks their coordinates.
        owners: The plugin that owns an axis, by axis.
        reason: What the backend said.
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
    """Find the collective at which ranks came apart; None if nothing tells it.

    Args:
        accounts: Of the ranks that answered, one that waits at the front.
        layout: Gives ranks their coordinates.
        owners: The plugin that owns an axis, by axis.
    """
    mismatch = _mismatch(accounts)
    found = mismatch or (None if accounts[0].exchanges else _missing(accounts))
    if found is None:
        return None
    collective, odd, text = found
    own = next((account.own for account in accounts if account.collectives[-1:] == (collective,)), None)
    return Fault(
        kind="missing" if mismatch is None else "mismatch",
        collective=collective,
        odd=odd,
        text=f"{_where(collective, layout, owners, own)}: " + text(layout),
    )


def _exchange(accounts: Sequence[Account], layout: Layout, owners: Mapping[str, str]) -> tuple[tuple[int, ...], str]:
    """Say whom a pipeline stage waits for: those of its pipeline that do not exchange, or do not answer."""
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
    """Find what a rank waits for that is itself waited for by a stage: a collective that it is in."""
    for account in accounts:
        if account.rank in odd and account.own is not None:
            others = [other for other in accounts if other is not account]
            return find_fault([account, *others], layout=layout, owners=owners)
    return None


def _when(account: Account) -> str:
    if account.step is None:
        return "before the first step"
    return f"in step {account.step}" if account.inside else f"after step {account.step}"


def _where(collective: Collective, layout: Names, owners: Mapping[str, str], own: bool | None) -> str:
    ranks = " and ".join(map(str, collective.ranks)) if len(collective.ranks) <= 4 else f"{len(collective.ranks)} ranks"
    return (
        f"collective {collective.number} over {collective.axis} "
        f"({'' if ' ranks' in ranks else 'ranks '}{ranks}; {_plugin(collective, layout, owners, own)})"
    )


def _plugin(collective: Collective, layout: Names, owners: Mapping[str, str], own: bool | None) -> str:
    """Name who issued it: the owner of its axis; composer3d's own run over all ranks, which may be one axis."""
    if own or collective.axis not in owners:
        return "composer3d"
    shared = own is None and len(collective.ranks) == layout.world_size
    return owners[collective.axis] + (" or composer3d" if shared else "")


def _by_line(accounts: Sequence[Account]) -> dict[Any, dict[int, dict[int, Collective]]]:
    """Return collectives by group and backend, rank and number."""
    groups: dict[Any, dict[int, dict[int, Collective]]] = {}
    for account in accounts:
        for collective in account.collectives:
            groups.setdefault(collective.line, {}).setdefault(account.rank, {})[collective.number] = collective
    return groups


def _mismatch(accounts: Sequence[Account]) -> Any:
    """Find the earliest collective of any group that ranks ran differently."""
    found: list[tuple[Collective, dict[int, Collective]]] = []
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

    def text(layout: Names) -> str:
        alike = any(str(here[rank]) == str(told) for rank in odd)  # but for their dtypes

        def act(ran: Collective) -> str:
            return f"{ran} in {', '.join(ran.dtypes)}" if alike else str(ran)

        shown = ", ".join(f"{layout.who(rank)} ran {act(here[rank])}" for rank in odd[:_SHOWN])
        return f"{shown}, while {_ranks(rank for rank in here if rank not in odd)} ran {act(told)}"

    return collective, odd, text


def _missing(accounts: Sequence[Account]) -> Any:
    """Find the collective that others wait in, and who has not run it, from the failed rank to whom all wait for."""
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

    def text(layout: Names) -> str:
        who = " and ".join(layout.who(rank) for rank in odd[:_SHOWN])
        waits = _ranks(rank for rank in last.ranks if rank not in odd and rank in by_rank)
        return f"{who} did not {'run' if late else 'come through'} {last}, in which {waits} waited"

    return last, odd, text


def _waited_in(account: Account) -> Collective:
    """Return what a rank waits in: NCCL's run behind the calls, so that it is the first that has not come back."""
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
    """Say what a rank did last, in a few words."""
    parts = [f"{_when(account)}"]
    if account.spans:
        parts.append("in " + " in ".join(reversed(account.spans)))
    if account.place:
        parts.append(f"at {account.place}")
    if account.collectives:
        last = account.collectives[-1]
        parts.append(f"last collective {last} over {last.axis} ({_plugin(last, layout, owners, account.own)})")
    return ", ".join(parts)
