"""Diagnosis of a run from its evidence: the first rank to fail, what the others waited for, and advice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer3d.diagnostics.doctor.advice import advice_for
from composer3d.diagnostics.doctor.anomalies import tell_anomaly
from composer3d.diagnostics.doctor.failure_kinds import Kind, kind_of
from composer3d.diagnostics.doctor.lateness import Pace, compare_paces
from composer3d.diagnostics.doctor.memory_causes import tell_memory, told_request
from composer3d.diagnostics.doctor.run_folder import Evidence
from composer3d.observation import Account, Fault, RecordedCollective, find_fault, told_act

__all__ = ["Diagnosis", "examine"]

_NO_KIND: tuple[Kind, Mapping[str, Any]] = ("lost", {})
_OUT_OF_STEP_S = 2.0  # a wait that long in a run that does not go on is told as one


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Diagnosis of a run.

    Args:
        kind: Of what happened.
        rank: The first to fail; None where none was.
        first: Who was first, and what happened to it.
        others: What the others did, or waited for; a line each.
        advice: What to try.
    """

    kind: Kind
    rank: int | None
    first: str
    others: tuple[str, ...]
    advice: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Told:
    kind: Kind
    rank: int | None
    first: str
    others: tuple[str, ...] = ()


def examine(evidence: Evidence) -> Diagnosis:
    """Say what happened to a run, or what happens in one that runs.

    Args:
        evidence: What it left.
    """
    if evidence.error is not None:
        told = _failed(evidence, evidence.error)
    elif "error.json" in evidence.damaged:
        told = _Told(kind="damaged", rank=None, first="the run failed, and its error.json cannot be read", others=())
    elif evidence.seen and not evidence.moved:
        told = _stands(evidence) or _runs(evidence)
    else:
        told = _runs(evidence)
    is_untold = told.kind == "vanished" and any(file.startswith("accounts") for file in evidence.damaged)
    if evidence.damaged and (told.kind == "ended" or is_untold):
        number = len(evidence.damaged)
        files = "a file of the run is" if number == 1 else f"{number} files of the run are"
        first = "the run ended, and a rank's account of how cannot be read" if is_untold else told.first
        told = replace(told, kind="damaged", first=f"{first}; {files} damaged")
    return Diagnosis(
        kind=told.kind,
        rank=told.rank,
        first=told.first,
        others=(
            *told.others,
            *evidence.findings,
            *(f"{file} is not what a run writes: {why}" for file, why in evidence.damaged.items()),
        ),
        advice=advice_for(told.kind, evidence, rank=told.rank),
    )


# ---- a run that failed -----------------------------------------------------------------------------------------------


def _failed(evidence: Evidence, error: Mapping[str, Any]) -> _Told:
    reports = [error, *error["others"]]
    own = [report for report in reports if not report["consequence"]]
    kind, report = next(((kind, one) for one in own or reports if (kind := kind_of(one)) is not None), _NO_KIND)
    report = report or error
    rank = report["rank"]
    fault = _fault(evidence, first=_waiting(evidence, error))
    if kind == "not_finite":
        first = _first_line(report).partition("; ")[0]  # what to try comes below
        return _Told(kind=kind, rank=None, first=first, others=tell_anomaly(evidence, report["step"]))
    if report["kind"] == "machine":
        return _Told(kind=kind, rank=None, first=f"{_first_line(report)}{_when(report)}")
    if kind == "disk_full":
        return _Told(kind=kind, rank=None, first=f"the disk was full{_when(report)}: {_first_line(report)}")
    if kind == "out_of_memory":
        request = told_request(_first_line(report))
        told = f"{request}{_place(report)}" if request else f": {_first_line(report)}"
        first = f"{_who(evidence, report)} ran out of memory{_when(report)}{told}"
        return _Told(
            kind=kind, rank=rank, first=first, others=(*tell_memory(evidence, rank), *_others(evidence, fault))
        )
    if not own:  # everybody lost somebody, or waited for too long
        return _came_apart(evidence, fault, error)
    if kind == "aborted" and fault is not None and rank in fault.odd:
        return _aborted(evidence, report, fault)
    if rank is None:
        return _Told(kind=kind, rank=None, first=_first_line(report), others=_others(evidence, fault))
    text = (
        _first_line(report)
        if not report["error"] or report["kind"] == "user"
        else (f"raised {report['error']}: {_first_line(report)}{_place(report)}")
    )
    first = f"{_who(evidence, report)} {text}{_when(report)}"
    first = first if report["kind"] != "user" else f"{text}{_when(report)}"
    return _Told(kind=kind, rank=rank, first=first, others=_others(evidence, fault, dead=rank))


def _came_apart(evidence: Evidence, fault: Fault | None, error: Mapping[str, Any]) -> _Told:
    """Report ranks that waited in vain: for one that hangs, or that called something else."""
    if fault is None:
        told = _first_line(error)
        return _Told(kind="lost", rank=error["rank"], first=f"{_who(evidence, error)} lost the others: {told}")
    return _told_fault(evidence, fault)


def _told_fault(evidence: Evidence, fault: Fault) -> _Told:
    rank = fault.odd[0]
    if fault.kind == "mismatch":
        kind: Kind = "shapes" if len({found.op for found in _collectives(evidence, fault)}) == 1 else "other_collective"
        return _Told(
            kind=kind, rank=rank, first=f"ranks ran different collectives: {fault.text}", others=_acts(evidence)
        )
    witness = evidence.witnesses.get(rank)
    inside = witness.opened[-1][0] if witness is not None and witness.opened else ""
    kind = "data" if inside == "data_wait" else "missing"
    where = "waits for data" if kind == "data" else "keeps the others waiting"
    first = f"{evidence.who(rank)} {where}{_since(evidence, rank)}: {_act(evidence, rank)}"
    return _Told(kind=kind, rank=rank, first=first, others=_others(evidence, fault))


def _aborted(evidence: Evidence, report: Mapping[str, Any], fault: Fault) -> _Told:
    """Report a rank that gloo ended, because a peer sent more than it expected: shapes differ."""
    waiting = [rank for rank in fault.collective.ranks if rank not in fault.odd]
    sent = " and ".join(evidence.who(rank) for rank in waiting)
    place = report["message"].partition("SIGABRT")[2]
    return _Told(
        kind="shapes",
        rank=report["rank"],
        first=f"{_who(evidence, report)} was aborted{place}{_when(report)}: it was sent more than it expected, "
        f"so its tensor is smaller than that of {sent}, {fault.collective} over {fault.collective.axis}",
        others=_others(evidence, fault, dead=report["rank"]),
    )


# ---- a run that goes on, stands still, or has ended ------------------------------------------------------------------


def _stands(evidence: Evidence) -> _Told | None:
    """Report who is waited for in a run whose ranks are alive and do not go on."""
    fault = _fault(evidence, first=_waiting(evidence, None))
    if fault is None:
        return None
    since = min(
        (account.collectives[-1].time_ns for rank, account in _accounts(evidence).items() if rank not in fault.odd),
        default=time.time_ns(),
    )
    if (time.time_ns() - since) / 1e9 < _OUT_OF_STEP_S and fault.kind == "missing":
        return None  # a moment of any step
    return _told_fault(evidence, fault)


def _runs(evidence: Evidence) -> _Told:
    pace = compare_paces(evidence.witnesses)
    if (late := pace.straggler) is not None:
        who = evidence.who(late.rank)
        first = (
            f"{who} is slow: {late.phase} takes it {1e3 * late.own_s:.1f} ms a step of its own, {late.ratio:.1f} times "
            f"the {1e3 * late.others_s:.1f} ms of the others"
        )
        waited = f"the others wait {1e3 * late.waited_s:.1f} ms of every step for it (median of {late.num_steps} steps)"
        return _Told(kind="straggler", rank=late.rank, first=first, others=(waited,))
    step = max((last.step for last in evidence.seen.values() if last.step is not None), default=None)
    if evidence.seen:
        told = f"{_ranks(len(evidence.seen), 'run', 'runs')}, in step {step}"
        return _Told(kind="running", rank=None, first=f"{told}{_paced(pace, evidence, 'is')}")
    ended = [witness.state for witness in evidence.witnesses.values()]
    if ended and set(ended) == {"ended"} and len(ended) == evidence.world_size:
        told = _ranks(len(ended), "ended as they should", "ended as it should")
        return _Told(kind="ended", rank=None, first=f"{told}{_paced(pace, evidence, 'was')}")
    silent = [evidence.who(rank) for rank in range(evidence.world_size) if rank not in evidence.witnesses]
    told = f"; {' and '.join(silent)} left nothing" if silent else ""
    return _Told(kind="vanished", rank=None, first=f"the run ended, and nobody wrote down why{told}")


def _ranks(number: int, many: str, one: str) -> str:
    return f"1 rank {one}" if number == 1 else f"{number} ranks {many}"


def _paced(pace: Pace, evidence: Evidence, verb: str) -> str:
    """Report that no rank is slow, as far as that is known; nothing for a rank without peers."""
    if evidence.world_size == 1:
        return ""
    if pace.known:
        return f"; none {verb} slow"
    return f"; too few steps of all of them to tell whether one {verb} slow"


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _accounts(evidence: Evidence) -> dict[int, Account]:
    return {rank: t.account for rank, t in evidence.witnesses.items() if t.account is not None}


def _owners(evidence: Evidence) -> Mapping[str, str]:
    return next(iter(evidence.witnesses.values())).owners if evidence.witnesses else {}


def _waiting(evidence: Evidence, error: Mapping[str, Any] | None) -> int | None:
    """Return a rank that waits in a collective: who failed for that first, or who is the longest in one."""
    accounts = _accounts(evidence)
    lost = [r["rank"] for r in (error, *error["others"]) if r["consequence"]] if error is not None else []
    inside = sorted(
        (rank for rank, account in accounts.items() if account.own is not None and account.collectives),
        key=lambda rank: accounts[rank].collectives[-1].time_ns,
    )
    return next((rank for rank in [*lost, *inside, *accounts] if rank in accounts), None)


def _fault(evidence: Evidence, *, first: int | None) -> Fault | None:
    accounts = _accounts(evidence)
    if first is None:
        return None
    # A rank that has gone on after the failure of others tells of what came later; the dead tell nothing.
    ordered = [accounts[first], *(account for rank, account in accounts.items() if rank != first)]
    return find_fault(ordered, layout=evidence, owners=_owners(evidence))


def _collectives(evidence: Evidence, fault: Fault) -> list[RecordedCollective]:
    """Return what every rank ran in the place of the collective at which they came apart."""
    place = fault.collective.ranks, fault.collective.number
    rows = [row for account in _accounts(evidence).values() for row in account.collectives]
    return [row for row in rows if (row.ranks, row.number) == place]


def _others(evidence: Evidence, fault: Fault | None, *, dead: int | None = None) -> tuple[str, ...]:
    told = () if fault is None or fault.kind != "missing" else (fault.text,)
    odd = fault.odd if fault is not None else ()
    return told + tuple(
        f"{evidence.who(rank)}: {_act(evidence, rank)}"
        for rank in sorted(evidence.witnesses)[:8]
        if rank != dead and rank not in odd and rank in _accounts(evidence)
    )


def _acts(evidence: Evidence) -> tuple[str, ...]:
    return tuple(f"{evidence.who(rank)}: {_act(evidence, rank)}" for rank in sorted(_accounts(evidence))[:8])


def _act(evidence: Evidence, rank: int) -> str:
    account = _accounts(evidence).get(rank)
    return "it gave no answer" if account is None else told_act(account, evidence, _owners(evidence))


def _since(evidence: Evidence, rank: int) -> str:
    witness = evidence.witnesses.get(rank)
    if witness is None or not witness.opened:
        return ""
    return f", for {max(0.0, (witness.time_ns - witness.opened[-1][1]) / 1e9):.0f} s when it was asked"


# ---- reports ---------------------------------------------------------------------------------------------------------


def _who(evidence: Evidence, report: Mapping[str, Any]) -> str:
    return f"{evidence.who(report['rank'])} on {report['host']}"


def _first_line(report: Mapping[str, Any]) -> str:
    return str(report["message"]).partition("\n")[0]


def _when(report: Mapping[str, Any]) -> str:
    step = " before its first step" if report["step"] is None else f" in step {report['step']}"
    return step + (
        f" while {report['phase']}" if report["phase"] in ("loading", "evaluating", "saving", "closing") else ""
    )


def _place(report: Mapping[str, Any]) -> str:
    lines = [line.strip() for line in str(report["traceback"]).splitlines() if line.startswith('  File "')]
    return f" ({lines[-1].partition(' ')[2]})" if lines else ""
