"""Verdicts of an export: one for every key of the manifest, and the whole as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composer3d.errors import Problem
from composer3d.importing import Verdict

__all__ = ["ExportResult", "ExportedKey"]


@dataclass(frozen=True, kw_only=True)
class ExportedKey:
    """Verdict on one key of the manifest.

    Args:
        key: Dotted; a plugin's table without keys is one.
        line: In the manifest; None for a default that it leaves unsaid and the other system has otherwise.
        value: As the manifest means it.
        verdict: Of import's: what the written file, imported, says of the key.
        to: Keys of the written file.
        note: Why, or both values.
        is_allowed: Whether a refused key was allowed.
    """

    key: str
    line: int | None
    value: Any
    verdict: Verdict
    to: tuple[str, ...] = ()
    note: str = ""
    is_allowed: bool = False

    def __str__(self) -> str:
        place = "default" if self.line is None else f"line {self.line}"
        arrow = f" -> {', '.join(self.to)}" if self.to else ""
        allowed = " (allowed)" if self.is_allowed else ""
        note = f": {self.note}" if self.note else ""
        return f"  {place}: {self.key} = {self.value}{arrow}{allowed}{note}"


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Answer of `export_config`.

    Args:
        ok: Whether there is a file.
        system: The name and version of the system whose file it is.
        keys: One for every key that the manifest states, and every default that the other system has otherwise.
        text: Of the file; empty where a key is refused.
        problems: What the written file leaves to its user.
    """

    ok: bool
    system: Mapping[str, str]
    keys: tuple[ExportedKey, ...]
    text: str
    problems: tuple[Problem, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d export --json` prints."""
        keys = [asdict(entry) | {"verdict": str(entry.verdict), "to": list(entry.to)} for entry in self.keys]
        for entry in keys:
            del entry["is_allowed"]
        return {
            "ok": self.ok,
            "target": dict(self.system),
            "keys": keys,
            "file": self.text,
            "problems": [asdict(problem) for problem in self.problems],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the report, what needs a decision first."""
        shown: list[str] = []
        for verdict in Verdict:
            found = [entry for entry in self.keys if entry.verdict is verdict]
            if found:
                shown += [f"{verdict} ({len(found)}):", *map(str, found)]
        return shown
