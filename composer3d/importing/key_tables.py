"""One table a source system, as data: what every key of its schema becomes, and why.

A table is a TOML file beside this module. Its groups are written shortly:

    [[group]]
    within = "zero_optimization"            # block of the keys; none is the top of the file
    keys = ["overlap_comm"]                 # "*" is every key below the block
    is = "meaningless"                      # verdict; or `rule`, the function of the system's module that decides
    to = "run.log_every"                    # key of the manifest; the verdict is then "carried"
    when = { false = "meaningless" }        # other verdicts for single values
    off = "meaningless"                     # the verdict of false, null, 0, "" and [], where `when` says no other
    note = "..."

A system whose files hold another's keys too `includes` that table; its own groups come first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from composer3d.importing.verdicts import Verdict

__all__ = ["Entry", "KeyTable", "load_key_table", "path_of", "plugin_words", "systems"]

_FOLDER = Path(__file__).parent / "tables"
_WORDS = "words"
_OFF = ("none", "false", "off", "no", "null", "disabled", "{}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Translation of a key.

    Args:
        verdict: None where a rule decides.
        rule: Name of the function that decides.
        to: Key of the manifest.
        kind: How the value is converted: `integer`, `number`, `text`, `boolean`; none as it is.
        note: Why.
        when: Verdicts of single values, written as JSON.
        off: The verdict of values that switch nothing on.
    """

    verdict: Verdict | None = None
    rule: str | None = None
    to: str | None = None
    kind: str | None = None
    note: str = ""
    when: Mapping[str, Verdict] = field(default_factory=dict)
    off: Verdict | None = None

    def verdict_of(self, value: Any) -> Verdict | None:
        """Return the verdict of a value; None where a rule decides."""
        text = json.dumps(value, default=str)
        found = self.when.get(text, self.when.get(value) if isinstance(value, str) else None)
        if found is None and self.off is not None and (not value or str(value).lower() in _OFF):
            return self.off
        return found or self.verdict


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The keys of a source system.

    Args:
        name: `--from` takes it.
        title: As its users call it.
        version: Whose schema the table is.
        target: `compose` or `run`, what a file of that system describes by default.
        entries: By dotted key; one that ends in `.*` is for all below.
        unknown: By block: what the system does with a key that it does not have.
        comments: Beginnings of keys that are comments there.
        unknown_verdict: Of a key that it does not have.
        defaults: Of keys that decide where they are not there.
        values: Blocks that may be a value as well, as a path or a name.
        refuses: Blocks in which the system refuses a key that it does not have, "" the top of the file.
    """

    name: str
    title: str
    version: str
    target: str
    entries: Mapping[str, Entry]
    unknown: Mapping[str, str]
    comments: tuple[str, ...] = ()
    unknown_verdict: Verdict = Verdict.IGNORED_THERE
    defaults: Mapping[str, Any] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    refuses: frozenset[str] = frozenset()

    @functools.cached_property
    def blocks(self) -> frozenset[str]:
        """The keys that hold others, and no value."""
        above = {key.rsplit(".", depth)[0] for key in self.entries for depth in range(1, key.count(".") + 1)}
        return frozenset(above - self.values)

    def verdict_of_unknown(self, key: str) -> Verdict:
        """Return the verdict of a key that the system does not have."""
        return Verdict.REFUSED if key.rpartition(".")[0] in self.refuses else self.unknown_verdict

    def entry_of(self, key: str) -> Entry | None:
        """Return the entry of a key, or of the nearest block that is decided as a whole."""
        if key in self.entries:
            return self.entries[key]
        block = key
        while block:
            if f"{block}.*" in self.entries:
                return self.entries[f"{block}.*"]
            block = block.rpartition(".")[0]
        return None

    def said_of_unknown(self, key: str) -> str:
        """Return what the system does with a key that it does not have, in words."""
        block = key.rpartition(".")[0]
        while block and block not in self.unknown:
            block = block.rpartition(".")[0]
        return self.unknown.get(block, self.unknown.get("", f"{self.title} does nothing with it"))

    def siblings(self, key: str) -> list[str]:
        """Return the names that may stand in place of a key's last part."""
        block, _, _ = key.rpartition(".")
        prefix = f"{block}." if block else ""
        names = {
            known[len(prefix) :].split(".")[0]
            for known in self.entries
            if known.startswith(prefix) and known != f"{prefix}*"
        }
        return sorted(names - {"*"})


def systems() -> tuple[str, ...]:
    """Return the names of the systems that files are imported from."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml") if path.stem != _WORDS))


@functools.cache
def load_key_table(name: str) -> KeyTable:
    """Return a system's table."""
    content = _read(name)
    system, entries = content["system"], {}
    base = load_key_table(system["includes"]) if "includes" in system else None
    for group in content["group"]:
        entry = _entry(group)
        for block in group["within"] if isinstance(group.get("within"), list) else [group.get("within", "")]:
            for key in group["keys"]:
                full = f"{block}.{key}" if block else key
                assert full not in entries, f"{name}: {full} stands twice"
                entries[full] = entry
    if base is not None:
        entries = {**base.entries, **entries}
    return KeyTable(
        name=name,
        title=system["title"],
        version=system["version"],
        target=system["target"],
        entries=entries,
        unknown=content.get("unknown", {}),
        comments=tuple(system.get("comments", ())),
        unknown_verdict=Verdict(system.get("unknown_is", "ignored-there")),
        defaults=content.get("defaults", {}),
        values=frozenset(system.get("values", ())) | (base.values if base else frozenset()),
        refuses=frozenset(system.get("refuses", ())),
    )


@functools.cache
def plugin_words() -> Mapping[str, str]:
    """Return the manifest's table for each word by which the rules call a layout's part.

    The rules say "sharded" or "recomputed"; that a built-in plugin does it, and under which name, is data.
    """
    words: Mapping[str, str] = _read(_WORDS)["words"]
    return words


def path_of(to: str) -> str:
    """Return a key whose word, if it begins with one, is replaced by the table that it stands for."""
    if not to.startswith("@"):
        return to
    word, _, key = to[1:].partition(".")
    return plugin_words()[word] + (f".{key}" if key else "")


def _read(name: str) -> dict[str, Any]:
    with (_FOLDER / f"{name}.toml").open("rb") as file:
        return tomli.load(file)


def _entry(group: Mapping[str, Any]) -> Entry:
    stated = group.get("is") or (None if "rule" in group else "carried")
    return Entry(
        verdict=Verdict(stated) if stated else None,
        rule=group.get("rule"),
        to=group.get("to"),
        kind=group.get("as"),
        note=group.get("note", ""),
        when={value: Verdict(verdict) for value, verdict in group.get("when", {}).items()},
        off=Verdict(group["off"]) if "off" in group else None,
    )
