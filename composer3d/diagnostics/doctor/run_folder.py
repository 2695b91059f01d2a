"""Evidence in a run's folder, and accounts requested from ranks that are alive."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer3d.diagnostics.doctor.run_files import RankAccount, RunFiles
from composer3d.errors import ComposerError, MeshError
from composer3d.mesh import AXES, Layout, resolve
from composer3d.observation import Account
from composer3d.registry import Catalogue
from composer3d.runner import REPORT_REQUEST, LastSeen, accounts_folder, attempts_of

__all__ = ["Evidence", "Span", "Witness", "nonfinite_finders", "read_anomalies", "read_evidence"]

_PATIENCE_S = 3.0  # a rank looks several times a second, if what it is stuck in lets it


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank did, with its step and its times in ns since 1970."""

    name: str
    step: int | None
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Witness:
    """Account of one rank.

    Args:
        rank: Of the world, from 0.
        who: With its coordinates.
        host: Where it ran.
        state: `running`, `failed` or `ended`.
        time_ns: Of the account, ns since 1970.
        account: Its last collectives; None in a world of one.
        opened: The spans that were open, outermost first, with the time when each was opened.
        spans: Those that were closed, the newest last.
        owners: The plugin that owns an axis, by axis.
        memory: Bytes by kind.
        device: Type of the device that the rank computes on: `cpu` or `cuda`.
    """

    rank: int
    who: str
    host: str
    state: str
    time_ns: int
    account: Account | None
    opened: tuple[tuple[str, int], ...]
    spans: tuple[Span, ...]
    owners: Mapping[str, str]
    memory: Mapping[str, int]
    device: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of a run, from its folder and its living ranks.

    Args:
        run: The run's folder, `[run] output`.
        error: `error.json`, None where no failure was written down.
        witnesses: By rank, of the newest start.
        seen: Where ranks are that have not ended, by rank; empty for a run that has ended.
        moved: Whether one of those went on to another step while it was asked.
        anomalies: What was found not to be finite.
        findings: Sentences of plugins, of what has gone on for long.
        snapshots: Of memory, by file.
        damaged: What is not what a run writes, by file.
        world_size: Ranks there are, or were.
        layout: Its axes and degrees, if they are known.
    """

    run: Path
    error: Mapping[str, Any] | None
    witnesses: Mapping[int, Witness]
    seen: Mapping[int, LastSeen]
    moved: bool
    anomalies: tuple[Mapping[str, Any], ...]
    findings: tuple[str, ...]
    snapshots: Mapping[Path, Mapping[str, Any]]
    damaged: Mapping[str, str]
    world_size: int
    layout: Layout | None

    def who(self, rank: int | None) -> str:
        """Return a rank with its coordinates, as far as they are known; None is no rank of its own."""
        if rank is None:
            return "the ranks"
        if rank in self.witnesses:
            return self.witnesses[rank].who
        return f"rank {rank}" if self.layout is None or rank >= self.world_size else self.layout.who(rank)


def read_evidence(run: Path) -> Evidence:
    """Read a run's folder; ask the ranks that are alive, which takes 3 s if one does not answer.

    Args:
        run: The run's folder, `[run] output`.

    Raises:
        ComposerError: It is not one of a run.
    """
    if not (run / "manifest.toml").is_file() and not (run / "error.json").is_file() and not attempts_of(run).is_dir():
        raise ComposerError(f"{run}: is not the folder of a run, which has manifest.toml, or error.json")
    seen, moved = _ask(run)
    files = RunFiles(run=run, damaged={})
    error = files.failure() if not seen else None
    witnesses = _newest(files.accounts(accounts_folder(run)))
    sizes = [witness.world_size for witness in witnesses.values()]
    world_size = max([*sizes, *([error["world_size"]] if error else []), len(seen)], default=1)
    if not seen:  # a row that is being written is no damage
        files.read_metrics()
    described = files.environment() or {}
    return Evidence(
        run=run,
        error=error,
        witnesses={rank: _witness(one) for rank, one in witnesses.items()},
        seen=seen,
        moved=moved,
        anomalies=files.anomalies(name for _, name, _ in nonfinite_finders()),
        findings=files.findings(
            name for name, _, info in Catalogue.installed().classes() if "findings" in info.provides
        ),
        snapshots=files.snapshots(),
        world_size=world_size,
        layout=_layout(described.get("mesh", {}), world_size),
        damaged=files.damaged,
    )


def _layout(degrees: Mapping[str, int], world_size: int) -> Layout | None:
    """Return the layout of a run that has none but the core's axes, for ranks that cannot report any more."""
    try:
        return resolve(degrees, axes=AXES, world_size=world_size, default=None)
    except MeshError:
        return None


def read_anomalies(run: Path) -> tuple[Mapping[str, Any], ...]:
    """Return what plugins wrote of modules whose outputs were not finite.

    Args:
        run: The run's folder, `[run] output`.
    """
    return RunFiles(run=run, damaged={}).anomalies(name for _, name, _ in nonfinite_finders())


def nonfinite_finders() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield family, name and table of the installed plugins that find modules whose outputs were not finite."""
    for name, _, info in Catalogue.installed().classes():
        if "nonfinite_modules" in info.provides:
            yield info.family, name, info.provides["nonfinite_modules"]


def _ask(run: Path) -> tuple[dict[int, LastSeen], bool]:
    """Request accounts of the living ranks; return their last steps and phases, and whether one of them changed."""
    attempts = sorted(attempts_of(run).glob("*/"), key=lambda folder: folder.stat().st_mtime_ns)
    if not attempts:
        return {}, False
    before = _living(attempts[-1])
    if not before:
        return {}, False
    asked_ns = time.time_ns()
    (attempts[-1] / REPORT_REQUEST).write_text("")
    deadline = time.monotonic() + _PATIENCE_S
    folder = accounts_folder(run)
    while time.monotonic() < deadline:
        found = _newest(RunFiles(run=run, damaged={}).accounts(folder))  # one that is being written is no damage
        told = [rank for rank, one in found.items() if one.time_ns >= asked_ns]
        if set(before) <= set(told):
            break
        time.sleep(0.05)
    after = _living(attempts[-1])
    return after or before, any(rank not in after or after[rank] != last for rank, last in before.items())


def _living(attempt: Path) -> dict[int, LastSeen]:
    """Return the ranks of this machine whose processes are there and have not come to their end."""
    found = {}
    for path in attempt.glob("rank-*.progress"):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal():
            continue
        rank = int(number)
        last = LastSeen.read(attempt, rank)
        if last is not None and _is_alive(last.pid) and not (attempt / f"rank-{rank}.finished").exists():
            found[rank] = last
    return found


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _newest(found: Sequence[RankAccount]) -> dict[int, RankAccount]:
    """Return the ranks' accounts, of the newest start alone."""
    newest = max(found, key=lambda one: one.time_ns).attempt if found else None
    return {one.rank: one for one in sorted(found, key=lambda one: one.rank) if one.attempt == newest}


def _witness(found: RankAccount) -> Witness:
    return Witness(
        rank=found.rank,
        who=found.who,
        host=found.host,
        state=found.state,
        time_ns=found.time_ns,
        account=found.account,
        opened=tuple(found.open),
        spans=tuple(Span(name=name, step=step, start_ns=start, end_ns=end) for name, step, start, end in found.spans),
        owners=found.owners,
        memory=found.memory,
        device=found.device,
    )
