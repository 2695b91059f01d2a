"""Advice for every kind of failure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer3d.diagnostics.doctor.failure_kinds import Kind
from composer3d.diagnostics.doctor.run_folder import Evidence
from composer3d.errors import CheckpointError
from composer3d.registry import Catalogue

__all__ = ["advice_for"]

_ADVICE: dict[Kind, tuple[str, ...]] = {
    "killed": (
        "SIGKILL without a word often is the kernel's, for want of memory: look for the process in `dmesg -T` on its "
        "host, or for a limit of the scheduler; then proceed as for too little memory",
    ),
    "aborted": ("torch ends a process like that where a collective does not fit: --set run.debug=true compares them",),
    "left": ("something calls sys.exit, os._exit or returns on that rank alone; all ranks must run all steps",),
    "data": (
        "look at what the data source does there: a lock, a network disk, an empty queue; a sample must not depend on "
        "other ranks",
        "--set run.timeout_s=60 makes a hang a failure after a minute",
    ),
    "missing": (
        "every rank must call the same collectives in the same order: look for a branch on the rank, or on data, "
        "around that line, and for a rank that is stuck in something else",
        "--set run.debug=true compares every collective of all ranks before it is run",
    ),
    "other_collective": (
        "every rank must call the same collectives in the same order: look for a branch on the rank, or on data, "
        "around these lines",
        "--set run.debug=true compares every collective of all ranks before it is run",
    ),
    "shapes": (
        "ranks must pass tensors of equal shapes: look at what makes the size depend on the rank's data (padding, "
        "filtering, a last batch)",
        "--set run.debug=true compares the shapes of all ranks before every collective",
    ),
    "out_of_memory": (
        "a rank that needs more than the others has longer sequences, or a stage with the embedding or the head",
    ),
    "disk_full": ("free space there, or set checkpoint.keep lower, or run.output to another disk; then run again",),
    "straggler": (
        "compare its machine with the others': other processes, clock and temperature, its disk in data_wait, the "
        "length of its sequences",
    ),
    "lost": ("look at the network between the hosts, and at the last lines of every rank's own output",),
    "damaged": ("look for what else writes to the run's folder, and at the disk below it (dmesg -T)",),
    "vanished": ("the launcher was killed too, or the machine went down; run again, it goes on from the checkpoint",),
}


def advice_for(kind: Kind, evidence: Evidence, *, rank: int | None) -> tuple[str, ...]:
    """Return what to try.

    Args:
        kind: Of what happened.
        evidence: Of the run.
        rank: Who was first.
    """
    own: Iterable[str] = _ADVICE.get(kind, ())
    if kind == "not_finite":
        own = _not_finite(evidence)
    if kind == "machine" and evidence.error is not None:
        own = (evidence.error["advice"].partition("; then start")[0],)
    if kind == "out_of_memory":
        shown = () if evidence.snapshots else _shown("memory_snapshots", "what fills the memory when it runs out")
        own = (*_less_memory(), *own, *shown)
    if kind == "straggler":
        own = (
            *own,
            *_drained(evidence, rank),
            *_shown("traces", "where in the step it is, drawn by composer3d timeline"),
        )
    if kind in ("running", "ended", "straggler"):
        return tuple(own)
    return (*own, _resume(evidence.run, evidence.error))


def _drained(evidence: Evidence, rank: int | None) -> Iterable[str]:
    """Yield which node to drain, where ranks run on several."""
    hosts = {each.host for each in evidence.witnesses.values()}
    if rank is not None and rank in evidence.witnesses and len(hosts) > 1:
        host = evidence.witnesses[rank].host
        yield f"if it stays slow with other data too, it is its node: drain {host}, one of {len(hosts)}"


def _less_memory() -> Iterable[str]:
    catalogue = Catalogue.installed()
    recompute, shard = catalogue.offering("recompute", "full"), catalogue.offering("zero", 3)
    parts = [
        "halve train.microbatch",
        *([f"switch on {recompute}"] if recompute else []),
        "shard more (" + ", ".join([*([shard] if shard else []), "a higher tp or pp"]) + ")",
    ]
    yield "; ".join(parts)


def _shown(service: str, what: str) -> Iterable[str]:
    tables = Catalogue.installed().providing(service)
    return [f"{tables} shows {what}"] if tables else []


def _not_finite(evidence: Evidence) -> Iterable[str]:
    if not evidence.anomalies:
        yield f"composer3d doctor {evidence.run} --replay runs that step again, and finds the first module"
    yield "a lower optimizer.lr or train.grad_clip, more warmup; softmax, norms and losses in float32"
    yield 'stability.on_nonfinite = "skip" leaves such steps out'


def _resume(run: Path, error: Mapping[str, Any] | None = None) -> str:
    from composer3d.checkpoint import latest, other_than

    try:
        newest = latest(run / "checkpoints")
    except CheckpointError as damaged:
        return str(damaged)
    if newest is None:
        return "there is no complete checkpoint: the next run begins anew"
    name = rf"{re.escape(f'{newest.parent.name}/{newest.name}')}\b"  # the run may have had the folder's path otherwise
    if error is not None and error["error"] == "CheckpointError" and re.search(name, str(error["message"])):
        other = other_than(newest)
        return f"{newest} is damaged, and the next run would begin with it; " + (
            f"--resume {other} goes on from the one before it" if other else "--resume never begins anew"
        )
    return f"the next run goes on from {newest.relative_to(run)}"
