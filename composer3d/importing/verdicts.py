"""Verdicts of an import: one for every key of the source, and the whole as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from composer3d.errors import Problem

__all__ = ["ImportResult", "KeyVerdict", "Verdict"]


class Verdict(StrEnum):
    """Verdicts on keys, the ones to read first coming first."""

    REFUSED = "refused"
    """Training without it would be another experiment; nothing is written unless it is allowed by its key."""
    MISSING = "missing"
    """composer3d cannot do it; the note names the feature."""
    CHANGED = "changed"
    """Carried, with a difference in numbers or in memory that the note states."""
    CARRIED = "carried"
    """The same value stands in the key of the manifest."""
    DERIVED = "derived"
    """Computed from several keys, by the formula in the note."""
    EQUAL = "equal"
    """composer3d does so without a key."""
    IGNORED_THERE = "ignored-there"
    """The source itself does nothing with it."""
    MEANINGLESS = "meaningless"
    """About speed, memory or launching in the source; numbers do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class KeyVerdict:
    """Verdict on one key, with its reason.

    Args:
        key: Of the source, dotted.
        line: In the source's file.
        value: As it stands there; secrets are asterisks.
        verdict: See `Verdict`.
        to: The key of the manifest, or None.
        note: Why, or the difference in numbers.
        is_allowed: Whether a refused key was allowed.
    """

    key: str
    line: int
    value: Any
    verdict: Verdict
    to: str | None = None
    note: str = ""
    is_allowed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `keys`."""
        return {
            "key": self.key,
            "line": self.line,
            "value": self.value,
            "verdict": str(self.verdict),
            "to": self.to,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """Answer of `import_config`.

    Args:
        ok: Whether there is a manifest and nothing in it is wrong but what is to be filled in.
        system: The source's, with the version whose rules were taken.
        keys: One for every key of the source, in the order of the file.
        manifest: TOML with a comment for every key; empty where a key is refused.
        problems: Of the source, and of the manifest as `check` finds them.
        world_size: Ranks that the manifest was checked for; None for what its degrees multiply to.
    """

    ok: bool
    system: Mapping[str, str]
    keys: tuple[KeyVerdict, ...]
    manifest: str
    problems: tuple[Problem, ...]
    world_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d import --json` prints."""
        return {
            "ok": self.ok,
            "source": dict(self.system),
            "keys": [entry.to_json() for entry in self.keys],
            "manifest": self.manifest,
            "problems": [asdict(problem) for problem in self.problems],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report: what needs a decision first, what means nothing in one line a block."""
        shown: list[str] = []
        for verdict in Verdict:
            found = [entry for entry in self.keys if entry.verdict is verdict]
            if not found:
                continue
            shown.append(f"{verdict} ({len(found)}):")
            shown += _grouped(found) if verdict is Verdict.MEANINGLESS else _listed(found)
        return shown


def _listed(entries: list[KeyVerdict]) -> list[str]:
    """Return a line an entry; more than three that only differ in their keys are one."""
    alike: dict[tuple[str | None, str], list[KeyVerdict]] = {}
    for entry in entries:
        alike.setdefault((entry.to, entry.note), []).append(entry)
    lines = []
    for (to, note), found in alike.items():
        if len(found) <= 3 or not note:
            lines += [(entry.line, _line(entry)) for entry in found]
            continue
        named = ", ".join(f"{entry.key} = {_short(entry.value)}" for entry in found)
        arrow = f" -> {to}" if to else ""
        first, last = found[0].line, found[-1].line
        place = f"line {first}" if first == last else f"lines {first} to {last}"
        lines.append((first, f"  {place}: {named}{arrow}: {note}"))
    return [line for _, line in sorted(lines, key=lambda line: line[0])]


def _line(entry: KeyVerdict) -> str:
    arrow = f" -> {entry.to}" if entry.to else ""
    note = f": {entry.note}" if entry.note else ""
    allowed = " (allowed)" if entry.is_allowed else ""
    return f"  line {entry.line}: {entry.key} = {_short(entry.value)}{arrow}{allowed}{note}"


def _grouped(entries: list[KeyVerdict]) -> list[str]:
    blocks: dict[str, list[str]] = {}
    for entry in entries:
        block, _, last = entry.key.rpartition(".")
        blocks.setdefault(block, []).append(last)
    return [f"  {f'{block}: ' if block else ''}{', '.join(names)}" for block, names in blocks.items()]


def _short(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
