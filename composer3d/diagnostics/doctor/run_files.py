"""Files of a run's folder as typed values; a damaged file is noted, and nothing in it is trusted."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from composer3d.observation import Account

__all__ = ["RankAccount", "RunFiles"]

_LARGEST = 1 << 28  # bytes of a file that is read whole
_Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
_WorldSize = Annotated[int, Field(ge=1, le=1 << 20)]
_Step = Annotated[int, Field(ge=0)]


class _File(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Failure(_File):
    """Part of a failure's report that doctor reads; `error.json` is that of the first rank."""

    rank: _Rank | None
    world_size: _WorldSize
    host: str
    time_ns: int
    kind: str
    error: str
    message: str
    traceback: str
    step: _Step | None
    phase: str | None
    exit_code: int | None
    consequence: bool
    advice: str
    others: list[_Failure]


class RankAccount(_File):
    """A rank's account, `accounts/rank-R.json`."""

    attempt: str
    rank: _Rank
    world_size: _WorldSize
    who: str
    host: str
    time_ns: int
    state: Literal["running", "failed", "ended"]
    device: str
    memory: dict[str, int]
    account: Account | None = None
    open: list[tuple[str, int]] = Field(default_factory=list)
    spans: list[tuple[str, _Step | None, int, int]] = Field(default_factory=list)
    owners: dict[str, str] = Field(default_factory=dict)

    @field_validator("memory")
    @classmethod
    def _has_peak(cls, memory: dict[str, int]) -> dict[str, int]:
        if "peak_resident_bytes" not in memory:
            raise ValueError("peak_resident_bytes is missing")
        return memory


class _Anomaly(_File):
    """A module whose output was not finite, a line of `NAME/rank-R.jsonl`."""

    step: _Step
    rank: _Rank
    what: Literal["input", "output", "gradient", "weight gradient"]
    fqn: str
    kind: str = Field(alias="class")
    microbatch: int
    stage: int
    weights_not_finite: list[str]


class _Large(_File):
    tensor: str
    bytes: int


class _Snapshot(_File):
    """Contents of a rank's memory, `memory/*.json`."""

    step: _Step
    rank: _Rank
    error: str | None
    bytes: dict[str, int]
    largest_others: list[_Large]


class _Device(_File):
    type: str


class _Environment(_File):
    mesh: dict[str, Annotated[int, Field(ge=1, le=1 << 20)]]
    device: _Device
    manifest: dict[str, Any]


class _Row(_File):
    """A row of `metrics.jsonl`."""

    step: int


class _Finding(_File):
    step: int
    finding: str


M = TypeVar("M", bound=_File)


@dataclass(kw_only=True)
class RunFiles:
    """A reader that notes what it could not read.

    Args:
        run: The run's folder.
        damaged: What is not what a run writes, a line a file, by the file's path below the folder.
    """

    run: Path
    damaged: dict[str, str]

    def failure(self) -> Mapping[str, Any] | None:
        """Return `error.json`; None without one, or for a damaged one."""
        return _values(self._read(self.run / "error.json", _Failure))

    def environment(self) -> Mapping[str, Any] | None:
        """Return `environment.json`."""
        return _values(self._read(self.run / "environment.json", _Environment))

    def accounts(self, folder: Path) -> list[RankAccount]:
        """Return the accounts that ranks of several starts left in a folder."""
        found = (self._read(path, RankAccount) for path in sorted(folder.glob("rank-*.json")))
        return [content for content in found if content is not None]

    def snapshots(self) -> dict[Path, Mapping[str, Any]]:
        """Return the snapshots of memory, by file."""
        found = {path: _values(self._read(path, _Snapshot)) for path in sorted((self.run / "memory").glob("*.json"))}
        return {path: content for path, content in found.items() if content is not None}

    def anomalies(self, names: Iterable[str]) -> tuple[Mapping[str, Any], ...]:
        """Return what plugins of these names wrote of modules whose outputs were not finite."""
        paths = [path for name in names for path in sorted((self.run / name).glob("rank-*.jsonl"))]
        return tuple(row.model_dump(by_alias=True) for path in paths for row in self._rows(path, _Anomaly))

    def findings(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return what plugins of these names last found on each rank, where that is anything."""
        paths = [path for name in names for path in sorted((self.run / name).glob("rank-*.jsonl"))]
        last = [rows[-1] for path in paths if (rows := self._rows(path, _Finding))]
        return tuple(f"since step {row.step} {row.finding}" for row in last if row.finding)

    def read_metrics(self) -> None:
        """Note whether every row of `metrics.jsonl` is one."""
        self._rows(self.run / "metrics.jsonl", _Row)

    def _read(self, path: Path, kind: type[M]) -> M | None:
        content = self._bytes(path)
        if content is None:
            return None
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            self._note(path, _reason(error))
            return None

    def _rows(self, path: Path, kind: type[M]) -> list[M]:
        """Return the lines that can be read; a last one without its end is what a killed process leaves."""
        *lines, torn = (self._bytes(path) or b"").split(b"\n")
        rows, wrong = [], []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(kind.model_validate_json(line))
            except ValidationError as error:
                wrong.append(f"line {number}: {_reason(error)}")
        if torn:
            wrong.append("its last line is torn")
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            self._note(path, wrong[0] + more)
        return rows

    def _bytes(self, path: Path) -> bytes | None:
        """Return a file's content; None where there is none, or nothing that could be one."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                self._note(path, "it is not a file")
                return None
            if found.st_size > _LARGEST:
                self._note(path, f"it has {found.st_size:,} bytes")
                return None
            return path.read_bytes()
        except FileNotFoundError:
            if path.is_symlink():
                self._note(path, "it is a link to nothing")
            return None
        except OSError as error:
            self._note(path, (error.strerror or str(error)).lower())
            return None

    def _note(self, path: Path, reason: str) -> None:
        self.damaged[str(path.relative_to(self.run) if path.is_relative_to(self.run) else path)] = reason


def _values(content: _File | None) -> Mapping[str, Any] | None:
    return None if content is None else content.model_dump()


def _reason(error: ValidationError) -> str:
    """Return the first thing that is wrong, on one line."""
    first: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return (f"{place}: " if place else "") + str(first["msg"]).partition("\n")[0]
