"""Evidence in a run's folder, and accounts requested from ranks that are alive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer3d.errors import ComposerError, MeshError
from composer3d.mesh import AXES, Layout, resolve
from composer3d.observation import Account
from composer3d.registry import Catalogue
from composer3d.runner import ASKED, LastSeen, accounts_folder, attempts_of

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
    """What there is to judge by.

    Args:
        run: The run's folder, `[run] output`.
        error: `error.json`, None where no failure was written down.
        witnesses: By rank, of the newest start.
        seen: Where ranks are that have not ended, by rank; empty for a run that has ended.
        moved: Whether one of those went on to another step while it was asked.
        anomalies: What was found not to be finite.
        snapshots: Of memory, by file.
        rows: Of `metrics.jsonl`, the last ones.
        world_size: Ranks there are, or were.
        layout: Its axes and degrees, if they are known.
    """

    run: Path
    error: Mapping[str, Any] | None
    witnesses: Mapping[int, Witness]
    seen: Mapping[int, LastSeen]
    moved: bool
    anomalies: tuple[Mapping[str, Any], ...]
    snapshots: Mapping[Path, Mapping[str, Any]]
    rows: tuple[Mapping[str, Any], ...]
    world_size: int
    layout: Layout | None

    def who(self, rank: int) -> str:
        """Return a rank with its coordinates, as far as they are known."""
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
    error = _json(run / "error.json") if not seen else None
    witnesses = _witnesses(accounts_folder(run))
    sizes = [witness["world_size"] for witness in witnesses.values()]
    world_size = max([*sizes, *([error["world_size"]] if error else []), len(seen)], default=1)
    return Evidence(
        run=run,
        error=error,
        witnesses={rank: _witness(content) for rank, content in witnesses.items()},
        seen=seen,
        moved=moved,
        anomalies=tuple(read_anomalies(run)),
        snapshots={path: found for path in sorted((run / "memory").glob("*.json")) if (found := _json(path))},
        rows=tuple(_lines(run / "metrics.jsonl"))[-100:],
        world_size=world_size,
        layout=_layout(run, world_size),
    )


def _layout(run: Path, world_size: int) -> Layout | None:
    """Return the layout of a run that has none but the core's axes, for ranks that cannot report any more."""
    degrees = (_json(run / "environment.json") or {}).get("mesh", {})
    try:
        return resolve(degrees, axes=AXES, world_size=world_size, default=None)
    except MeshError:
        return None


def read_anomalies(run: Path) -> Iterable[Mapping[str, Any]]:
    """Yield what plugins wrote of modules whose outputs were not finite.

    Args:
        run: The run's folder, `[run] output`.
    """
    for _, name, _ in nonfinite_finders():
        for path in sorted((run / name).glob("rank-*.jsonl")):
            yield from _lines(path)


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
    (attempts[-1] / ASKED).write_text("")
    deadline = time.monotonic() + _PATIENCE_S
    folder = accounts_folder(run)
    while time.monotonic() < deadline:
        told = [rank for rank, content in _witnesses(folder).items() if content["time_ns"] >= asked_ns]
        if set(before) <= set(told):
            break
        time.sleep(0.05)
    after = _living(attempts[-1])
    return after or before, any(rank not in after or after[rank] != last for rank, last in before.items())


def _living(attempt: Path) -> dict[int, LastSeen]:
    """Return the ranks of this machine whose processes are there and have not come to their end."""
    found = {}
    for path in attempt.glob("rank-*.progress"):
        rank = int(path.stem.removeprefix("rank-"))
        last = LastSeen.read(attempt, rank)
        if last is not None and _is_alive(last.pid) and not (attempt / f"rank-{rank}.finished").exists():
            found[rank] = last
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _witnesses(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the ranks' accounts, of the newest start alone."""
    found = [content for path in folder.glob("rank-*.json") if (content := _json(path)) is not None]
    newest = max(found, key=lambda content: int(content["time_ns"]), default={"attempt": None})["attempt"]
    return {
        content["rank"]: content for content in sorted(found, key=lambda c: c["rank"]) if content["attempt"] == newest
    }


def _witness(content: Mapping[str, Any]) -> Witness:
    account = content.get("account")
    return Witness(
        rank=content["rank"],
        who=content["who"],
        host=content["host"],
        state=content["state"],
        time_ns=content["time_ns"],
        account=None if account is None else Account.from_json(account),
        opened=tuple((name, start_ns) for name, start_ns in content.get("open", ())),
        spans=tuple(
            Span(name=name, step=step, start_ns=start, end_ns=end)
            for name, step, start, end in content.get("spans", ())
        ),
        owners=content.get("owners", {}),
        memory=content["memory"],
        device=content["device"],
    )


def _json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, up to a truncated one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
