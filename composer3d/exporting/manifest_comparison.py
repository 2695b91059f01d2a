"""Verdicts of an export: a manifest beside the one that the written file is imported as."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from composer3d.exporting.export_result import ExportedKey
from composer3d.exporting.meaning import Meaning
from composer3d.exporting.writers import Writer
from composer3d.importing import Translation, Verdict, path_of
from composer3d.registry import FAMILIES
from composer3d.runner import BatchSize, multiplier_of

__all__ = ["UNSAID", "compare"]

UNSAID = "the manifest's own: the file does not say"  # of a setting without which no manifest of a run can be read

# Tables of which an importer writes every value that differs from its default; of others silence says nothing.
_DECIDED = ("mesh", "sharding", "scheduling", "precision", "communication", "optimizer", "lr_schedule")
_DECIDED_KEYS = ("train.microbatch", "train.global_batch", "train.accumulate", "train.grad_clip")
_MOST_STEPS = 4000  # of a schedule that are compared
_BATCH = ("train.global_batch", "train.accumulate")
_SPEED = tuple(
    f"@sharded.{key}" for key in ("forward_prefetch", "backward_prefetch", "gather_early", "overlap_optimizer")
)


def compare(
    here: Meaning,
    there: Meaning,
    translation: Translation,
    writer: Writer,
    *,
    unsaid: Collection[str],
    allowed: Sequence[str],
) -> tuple[ExportedKey, ...]:
    """Return the verdict of every key that a manifest states, and of every default that is another one there.

    Args:
        here: The manifest's.
        there: Of the written file, imported.
        translation: Its import.
        writer: Of the system.
        unsaid: Tables of which the file says nothing.
        allowed: Keys whose refusal is overruled.
    """
    judge = _Judge(here, there, translation, writer, unsaid, allowed)
    stated = [judge.stated(key, line) for key, line in here.stated.items()]
    silent = [judge.silent(key) for key in _differing_defaults(here, there, judge)]
    return tuple(stated + silent)


class _Judge:
    """Judges single keys."""

    def __init__(
        self,
        here: Meaning,
        there: Meaning,
        translation: Translation,
        writer: Writer,
        unsaid: Collection[str],
        allowed: Sequence[str],
    ) -> None:
        self.here, self.there, self.translation, self.writer = here, there, translation, writer
        self._unsaid, self._allowed = unsaid, allowed
        self._schedule = _schedules_differ(here, there) if here.is_run else None
        self._sources: dict[str, list[str]] = {}
        for verdict in translation.verdicts.values():
            if verdict.to is not None:
                self._sources.setdefault(verdict.to, []).append(verdict.key)
        self._speed = frozenset(map(path_of, _SPEED))
        self._notes = {path_of(key): note for key, note in writer.notes.items()}
        self._verdicts = {path_of(key): verdict for key, verdict in writer.verdicts.items()}

    def is_said(self, key: str) -> bool:
        """Return whether the written file, or a default of its system, decides a key."""
        if key in self.translation.settings and self.translation.settings[key].reason == UNSAID:
            return False
        if key.split(".")[0] in self._unsaid:
            return False
        if any(path == key or path.startswith(f"{key}.") for path in self.translation.settings):
            return True
        if key in _BATCH and self.there.degree is not None:
            return True
        return key.split(".")[0] in _DECIDED or key in _DECIDED_KEYS

    def differs(self, key: str) -> bool:
        """Return whether a key has another value in the two manifests."""
        if key.startswith("lr_schedule.") and self._schedule is not None:
            return bool(self._schedule)
        if key in self.here.plugins or key in self.there.plugins:
            return (key in self.here.plugins) != (key in self.there.plugins)
        return not _equal(self.here.values.get(key), self.there.values.get(key))

    def stated(self, key: str, line: int | None) -> ExportedKey:
        """Return the verdict of a key that the manifest states."""
        to = tuple(self._sources.get(key, ()))
        if not self.is_said(key) or not self._has_table(key):
            return self._entry(key, line, self._absent(key), self._note(key))
        if not self.differs(key):
            return self._entry(key, line, Verdict.CARRIED if to else Verdict.EQUAL, self._left(key, to), to)
        if key in self._speed:
            return self._entry(key, line, Verdict.MEANINGLESS, "speed")
        if not to and key not in self.translation.settings and self.there.values.get(key) is None:
            return self._entry(key, line, self._absent(key), self._note(key))
        return self._entry(key, line, self._verdicts.get(key, Verdict.CHANGED), self._difference(key), to)

    def silent(self, key: str) -> ExportedKey:
        """Return the verdict of a default that is another one there."""
        note = self._difference(key)
        return self._entry(key, None, self._verdicts.get(key, Verdict.CHANGED), note, tuple(self._sources.get(key, ())))

    def _entry(
        self, key: str, line: int | None, verdict: Verdict, note: str = "", to: tuple[str, ...] = ()
    ) -> ExportedKey:
        value = self.here.values.get(key)
        is_allowed = verdict is Verdict.REFUSED and key in self._allowed
        if key in self.here.plugins:
            value = {}
        return ExportedKey(key=key, line=line, value=value, verdict=verdict, to=to, note=note, is_allowed=is_allowed)

    def _absent(self, key: str) -> Verdict:
        found = [verdict for path, verdict in self._verdicts.items() if key == path or key.startswith(f"{path}.")]
        return found[0] if found else Verdict.MISSING

    def _has_table(self, key: str) -> bool:
        """Return whether a plugin's table is there too, if the key is one of a plugin."""
        parts = key.split(".")
        return parts[0] not in FAMILIES or ".".join(parts[:2]) in self.there.plugins

    def _note(self, key: str) -> str:
        paths = [path for path in self._notes if key == path or key.startswith(f"{path}.")]
        default = f"{self.translation.table.title} has no key for it"
        return self._notes[max(paths, key=len)] if paths else default

    def _left(self, key: str, to: tuple[str, ...]) -> str:
        """Return who says a degree that the written file does not: the launcher, by the number of its ranks."""
        table, _, axis = key.partition(".")
        is_left = not to and table == "mesh" and (self.here.axis(axis) or 0) > 1
        return f"what the {self.here.world} ranks of the launcher leave" if is_left else ""

    def _difference(self, key: str) -> str:
        if key.startswith("lr_schedule.") and self._schedule:
            return self._schedule
        if key in self.there.plugins:
            return "nothing here, there it is switched on"
        values = f"{_shown(self.here.values.get(key))} here, {_shown(self.there.values.get(key))} there"
        note = next((note for path, note in self._notes.items() if path == key), None)
        return f"{values}; {note}" if note else values


def _differing_defaults(here: Meaning, there: Meaning, judge: _Judge) -> Iterator[str]:
    """Yield keys that the manifest leaves unsaid and that have another value there."""
    yield from sorted(plugin for plugin in there.plugins - here.plugins if not _is_idle(there, plugin))
    has_schedule = any(key.startswith("lr_schedule.") for key in here.stated)
    for key in there.values:
        table = ".".join(key.split(".")[:2]) if key.split(".")[0] in FAMILIES else key.split(".")[0]
        is_plugin = table in there.plugins
        if key in here.stated or (is_plugin and table not in here.plugins) or not judge.is_said(key):
            continue
        if key.startswith("lr_schedule.") and (has_schedule or key != "lr_schedule.use"):
            continue
        if key in _BATCH and any(batch in here.stated for batch in _BATCH):
            continue
        if judge.differs(key):
            yield key


def _is_idle(meaning: Meaning, plugin: str) -> bool:
    """Return whether a plugin is there and converts nothing: float32 in mixed precision."""
    dtypes = {meaning.get("@mixed.param_dtype"), meaning.get("@mixed.reduce_dtype")}
    return plugin == path_of("@mixed") and dtypes == {"float32"}


def _schedules_differ(here: Meaning, there: Meaning) -> str:
    """Return by how much the learning rate differs at most, in words; empty where it is the same in every step."""
    steps = int(here.get("train.steps", 1))
    functions: list[Callable[[int], float]] = []
    for meaning in (here, there):
        manifest = meaning.manifest
        folder = manifest.document.folder
        try:
            sizes = BatchSize(manifest.tables["train"], degree=1)
            functions.append(multiplier_of(manifest.tables["lr_schedule"], num_steps=steps, folder=folder, sizes=sizes))
        except Exception as error:  # a callable of the user's, whatever its import raises
            return f"the callable cannot be compared: {error}"
    stride = max(1, steps // _MOST_STEPS)
    gaps = [(abs(functions[0](step) - functions[1](step)), step) for step in range(0, steps, stride)]
    largest, step = max(gaps)
    if largest <= 1e-12:
        return ""
    first, second = functions[0](step), functions[1](step)
    return f"{first:.6g} x lr here, {second:.6g} x lr there in step {step + 1}, where they differ most"


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left == right or math.isclose(left, right, rel_tol=1e-15)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
