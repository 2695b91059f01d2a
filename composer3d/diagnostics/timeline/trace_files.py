"""Reading trace files: OTLP's JSON encoding, a line an export, a file a rank."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer3d.errors import ComposerError
from composer3d.registry import Catalogue

__all__ = ["Span", "Trace", "read_trace"]

_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span of one rank; times are ns since 1970."""

    name: str
    id: str
    parent: str
    start: int
    end: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """From its start to its end; of several that were merged, the time that they took themselves."""
        return float(self.attributes.get("busy_ns", self.end - self.start)) / 1e9

    @property
    def is_collective(self) -> bool:
        """Whether it is communication: those name the mesh axis."""
        return "axis" in self.attributes


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The newest start of a run.

    Args:
        ranks: Spans by rank, in order of their starts.
        coordinates: Of every rank along the mesh axes.
        memory: Resident bytes of every rank, in order of time.
        rows: Of `metrics.jsonl`, as far as there is one.
        truncated: Files whose last line is truncated, as by a kill.
        missing: Ranks of the run of which there is no span.
    """

    ranks: Mapping[int, tuple[Span, ...]]
    coordinates: Mapping[int, Mapping[str, int]]
    memory: Mapping[int, tuple[float, ...]]
    rows: tuple[Mapping[str, Any], ...]
    truncated: tuple[str, ...]
    missing: tuple[int, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """Sentences on what the trace lacks."""
        found = [f"{name} was cut off: its rank was killed" for name in self.truncated]
        if self.missing:
            number = f"rank{'s' * (len(self.missing) > 1)} {', '.join(map(str, self.missing))}"
            found.append(f"no spans of {number}, whose trace files are missing, empty or damaged: figures leave it out")
        return found


def read_trace(run: Path) -> Trace:
    """Read a run's folder, or the folder of its trace files.

    Args:
        run: With `traces/rank-R.jsonl` in it, or those files themselves; `rank-R.jsonl.1` and so on hold what was
            before.

    Raises:
        ComposerError: There are no trace files, or none with spans.
    """
    if not run.is_dir():
        raise ComposerError(
            f"{run}: {'is a file, and no folder of a run' if run.exists() else 'there is no such folder'}"
        )
    folder = run / "traces" if (run / "traces").is_dir() else run
    matches = [(re.fullmatch(r"rank-(\d+)\.jsonl", path.name), path) for path in folder.glob("rank-*.jsonl")]
    files = {int(match[1]): path for match, path in matches if match}
    if not files:
        tables = Catalogue.installed().providing("traces") or "a plugin that provides them"
        raise ComposerError(f"{run}: there are no trace files; a run leaves them in traces/ with {tables}")
    groups: dict[int, list[tuple[str, Mapping[str, Any], list[Span]]]] = {}
    truncated = []
    for rank, path in sorted(files.items()):
        groups[rank] = []
        for part in _parts(path):
            rows, complete = _lines(part)
            for number, row in enumerate(rows, start=1):
                with _written_by_a_run(f"{part}:{number}"):
                    groups[rank].append(_group(row))
            if not complete:
                truncated.append(part.name)
    if not any(groups.values()):
        raise ComposerError(f"{run}: the trace files hold no span")
    # A run that was started again goes on in the same files; what the last start wrote is what counts.
    newest = max((spans[-1].end, instance) for found in groups.values() for instance, _, spans in found)[1]
    ranks, coordinates = {}, {}
    for rank, found in groups.items():
        own = [(resource, spans) for instance, resource, spans in found if instance == newest]
        if own:
            ranks[rank] = tuple(sorted((span for _, spans in own for span in spans), key=lambda span: span.start))
            prefix = "composer3d.mesh."
            coordinates[rank] = {k.removeprefix(prefix): v for k, v in own[-1][0].items() if k.startswith(prefix)}
    metrics = run / "metrics.jsonl"
    return Trace(
        ranks=ranks,
        coordinates=coordinates,
        memory={rank: _memory(folder / f"rank-{rank}.metrics.jsonl") for rank in ranks},
        rows=tuple(row for row in _lines(metrics)[0] if isinstance(row, dict)) if metrics.is_file() else (),
        truncated=tuple(truncated),
        missing=tuple(sorted({*groups, *range(_num_ranks(run))} - ranks.keys())),
    )


def _num_ranks(run: Path) -> int:
    """Return the ranks of a run, as its folder says; 0 where it does not."""
    try:
        number = json.loads((run / "environment.json").read_bytes())["world_size"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0
    return number if type(number) is int and 0 < number <= _MOST_RANKS else 0


def _parts(path: Path) -> list[Path]:
    """Return a file with those that were put aside when it was full, the oldest first."""
    aside = [found for found in path.parent.glob(f"{path.name}.*") if found.suffix[1:].isdigit()]
    return [*sorted(aside, key=lambda found: -int(found.suffix[1:])), *([path] if path.is_file() else [])]


def _lines(path: Path) -> tuple[list[Any], bool]:
    """Return what the lines hold, up to a truncated one, and whether there was none."""
    result = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ComposerError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    for line in content.splitlines():
        try:
            result.append(json.loads(line))
        except (ValueError, RecursionError):
            return result, False
    return result, True


@contextlib.contextmanager
def _written_by_a_run(place: Path | str) -> Iterator[None]:
    """Refuse values that no run writes.

    Raises:
        ComposerError: Names the file, and the line where that is known.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ComposerError(
            f"{place}: holds what no run writes ({type(error).__name__}: {error}); remove the file, or those lines"
        ) from error


def _group(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], list[Span]]:
    resource, spans = {}, []
    for group in row["resourceSpans"]:
        resource = _attributes(group["resource"]["attributes"])
        for scope in group["scopeSpans"]:
            spans += [_span(span) for span in scope["spans"]]
    return str(resource.get("service.instance.id", "")).partition("/")[0], resource, spans


def _span(span: Mapping[str, Any]) -> Span:
    start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
    if not 0 <= start <= end < 2**64:
        raise ValueError(f"a span from {start:.3g} to {end:.3g} ns")
    return Span(
        name=span["name"],
        id=span["spanId"],
        parent=span.get("parentSpanId", ""),
        start=start,
        end=end,
        attributes=_attributes(span.get("attributes", ())),
    )


def _attributes(items: Any) -> dict[str, Any]:
    result = {}
    for item in items:
        ((kind, value),) = item["value"].items()
        result[item["key"]] = int(value) if kind == "intValue" else value
    return result


def _memory(path: Path) -> tuple[float, ...]:
    with _written_by_a_run(path):
        return tuple(
            float(metric["data"]["data_points"][-1]["value"])
            for part in _parts(path)
            for row in _lines(part)[0]
            for resource in row["resource_metrics"]
            for scope in resource["scope_metrics"]
            for metric in scope["metrics"]
            if metric["name"] == "composer3d.memory.resident"
        )
