"""The translation of one file: verdicts, settings of the manifest, and what the loop has to do itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer3d.errors import Problem, did_you_mean
from composer3d.importing.key_tables import Entry, KeyTable, path_of, plugin_words
from composer3d.importing.leaves import Leaf, SourceTree
from composer3d.importing.source_values import open_name, shown_value, written
from composer3d.importing.verdicts import KeyVerdict, Verdict

__all__ = ["AUTO", "Options", "Rule", "Setting", "Translation", "translate"]

_GUESSED = (Verdict.MEANINGLESS, Verdict.IGNORED_THERE, Verdict.EQUAL)
AUTO = "auto"  # of a value that a trainer fills in


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the user beside the file.

    Args:
        target: `compose`, a manifest for a loop of one's own, or `run`; None is what such files describe.
        world_size: Ranks of the run that the file describes, where it does not say so.
        arguments: Of transformers' Trainer, which fill in "auto"; None where none are given.
        model: `model.use`, or a Hugging Face model.
        data: `data.use`.
        version: Of the source system.
        allowed: Keys whose refusal is overruled, or blocks of such keys; `auto` is all whose value that is.
    """

    target: Literal["compose", "run"] | None = None
    world_size: int | None = None
    arguments: Mapping[str, Any] | None = None
    model: str | None = None
    data: str | None = None
    version: str | None = None
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of the manifest.

    Args:
        value: As TOML has it.
        reason: Its comment: the source's key and value, or whose default it is.
    """

    value: Any
    reason: str


# What compose() takes of a manifest besides the plugins' tables; the rest is the loop's.
_EMBEDDED_TRAIN = ("train.microbatch", "train.global_batch", "train.seed", "train.random_numbers")
_EMBEDDED_TABLES = ("mesh", "sharding", "scheduling", "precision", "communication", "profiling")


@dataclass(kw_only=True)
class Translation:
    """Collects what becomes of a file; rules of the source systems write into it.

    Args:
        tree: The file.
        table: What becomes of its keys.
        options: The user's.

    Attributes:
        ranks: Of the run, where the source says how many its launcher starts.
        unknown: Keys whose values only running a script tells.
    """

    tree: SourceTree
    table: KeyTable
    options: Options
    ranks: int | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    loop: list[str] = field(default_factory=list)
    verdicts: dict[str, KeyVerdict] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        """Whether the manifest is one of `composer3d run`."""
        return self.options.target == "run"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self.tree.leaves

    def has_block(self, block: str) -> bool:
        """Return whether a key, or any below it, is there."""
        return any(True for _ in self.tree.below(block))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        leaf = self.tree.leaves.get(key)
        return default if leaf is None else leaf.value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number, also one that is written as text; a value that is none is a problem."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(key, "must be a number")
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, least: int | None = None) -> int | None:
        """Return a whole number; `1e9` is one."""
        value = self.number(key)
        if value is None:
            return default
        if value != int(value) or (least is not None and value < least):
            self.wrong(key, "must be a whole number" + ("" if least is None else f" of at least {least}"))
            return default
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean, also one that is written as text or as a number."""
        value = self.get(key)
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        if value is None:
            return default
        if not isinstance(value, bool) and value not in (0, 1):
            self.wrong(key, "must be true or false")
            return default
        return bool(value)

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(key, "must be a text")
            return default
        return value

    # ---- writing -----------------------------------------------------------------------------------------------------

    def judge(self, key: str, verdict: Verdict | str, note: str = "", *, to: str | None = None) -> None:
        """Give a key its verdict; a key that is not there, or has one, is left alone.

        Args:
            key: Of the source, dotted.
            verdict: What became of it.
            note: Why, or the difference; `[@word]` stands for a plugin's table there.
            to: The manifest's key, with the words of `plugin_words` as `@word.key`.
        """
        leaf = self.tree.leaves.get(key)
        if leaf is None or key in self.verdicts:
            return
        note = re.sub(r"\[@(\w+)\]", lambda word: f"[{plugin_words()[word[1]]}]", note)
        path = None if to is None else path_of(to)
        if path is not None and not self.is_kept(path):
            path, note = None, f"the loop's own: {path}" + (f"; {note}" if note else "")
        self.verdicts[key] = KeyVerdict(
            key=leaf.shown,
            line=leaf.line,
            value=shown_value(leaf),
            verdict=Verdict(verdict),
            to=path,
            note=note,
            is_allowed=Verdict(verdict) is Verdict.REFUSED and self.is_allowed(key),
        )

    def judge_block(self, block: str, verdict: Verdict | str, note: str = "", *, to: str | None = None) -> None:
        """Give every key of a block that has no verdict this one."""
        for leaf in self.tree.below(block):
            self.judge(leaf.key, verdict, note, to=to)

    def put(self, to: str, value: Any, *sources: str, reason: str | None = None) -> None:
        """Set a key of the manifest.

        Args:
            to: Dotted, with the words of `plugin_words` as `@word.key`; a table by itself is there without keys.
            value: As TOML has it; None for a table.
            sources: The source's keys that it comes from.
            reason: Instead of them, or where there is none: whose default it is.
        """
        leaves = [self.tree.leaves[key] for key in sources if key in self]
        stated = [f"{leaf.shown} = {written(shown_value(leaf))}" for leaf in leaves]
        text = "from " + ", ".join(stated) if stated else ""
        self.settings[path_of(to)] = Setting(value=value, reason="; ".join(filter(None, (text, reason))))

    def carry(self, key: str, to: str, value: Any, note: str = "", *, verdict: str = "carried") -> None:
        """Set a key of the manifest from one of the source, if that is there."""
        if key in self:
            self.put(to, value, key)
            self.judge(key, verdict, note, to=to)

    def carry_text(self, key: str, to: str) -> None:
        """Set a key of the manifest from a text of the source that is not empty."""
        if value := self.text(key):
            self.carry(key, to, value)

    def switch(self, key: str, to: str, note: str = "") -> None:
        """Write a table of the manifest without keys where a flag of the source is on."""
        if self.flag(key):
            self.carry(key, to, None, note)

    def state(self, key: str, to: str, value: Any, note: str = "") -> None:
        """Set a key of the manifest from one of the source, or from the source's default where that is not there."""
        self.put(to, value, key, reason=None if key in self else f"{self.table.title}'s default")
        self.judge(key, "carried", note, to=to)

    def wrong(self, key: str, message: str, *, hint: str | None = None) -> None:
        """Report a mistake of the source at a key, which is refused."""
        leaf = self.tree.leaves[key]
        verdict = self.verdicts.get(key)
        if verdict is not None and verdict.verdict is Verdict.REFUSED:
            return
        if (name := open_name(leaf.value)) is not None:
            self.unknown.append(key)
            message, hint = "is not known without running the script", f"--arg {name}=VALUE"
            if not name:
                hint = f"import the file with -- --{leaf.shown} VALUE behind it"
        self.problems.append(
            Problem(
                message=f"{leaf.shown} = {written(shown_value(leaf))} {message}",
                file=self.tree.file,
                line=leaf.line,
                column=leaf.column,
                table=".".join(leaf.path[:-1]) or None,
                key=leaf.path[-1],
                hint=hint,
            )
        )
        self.judge(key, Verdict.REFUSED, message)

    def unsettle(self, decider: str, keys: Iterable[str]) -> None:
        """Say of keys that another one decides about that they are as little known as that one's value.

        Args:
            decider: The key; nothing happens where its value is known.
            keys: Of which a verdict would be a guess.
        """
        if decider in self.unknown:
            for key in keys:
                if key != decider and key in self.verdicts and self.verdicts[key].verdict in _GUESSED:
                    del self.verdicts[key]
                    self.judge(key, Verdict.MISSING, f"{self.tree.leaves[decider].shown} decides, and is not known")

    def refuse(self, key: str, note: str) -> None:
        """Refuse a key, whatever its verdict was before."""
        self.verdicts.pop(key, None)
        self.judge(key, Verdict.REFUSED, note)

    def stated_as(self, to: str) -> str:
        """Return the key of the source that a setting of the manifest comes from."""
        return next(key for key, entry in self.verdicts.items() if entry.to == path_of(to))

    def is_allowed(self, key: str) -> bool:
        """Return whether the user overruled the refusal of a key."""
        if self.get(key) == AUTO and AUTO in self.options.allowed:
            return True
        names = (key, self.tree.leaves[key].shown)
        return any(name == one or name.startswith(f"{one}.") for one in self.options.allowed for name in names)

    def is_kept(self, path: str) -> bool:
        """Return whether a key of the manifest is written, and not the loop's own."""
        table = path.split(".")[0]
        return self.is_run or table in _EMBEDDED_TABLES or path in _EMBEDDED_TRAIN or path == "model.blocks"


Rule = Callable[[Translation], None]


def translate(translation: Translation, rules: Mapping[str, Rule]) -> None:
    """Judge every key: simple ones by the table, the others by the rules, the rest as what it is, unknown.

    Args:
        translation: Of the file; filled.
        rules: By the name that the table's entries have.
    """
    table, ruled = translation.table, set()
    for leaf in translation.tree.leaves.values():
        entry = table.entry_of(leaf.key)
        if leaf.key in table.blocks and not leaf.value and entry is None:
            translation.judge(leaf.key, Verdict.EQUAL, "empty: all defaults")
        elif leaf.key in table.blocks and leaf.value:
            translation.wrong(leaf.key, f"is no table: {table.title} reads keys inside of it")
        elif entry is None:
            _judge_unknown(translation, leaf)
        elif (verdict := entry.verdict_of(leaf.value)) is not None:
            _apply(translation, leaf, entry, verdict)
        else:
            ruled.add(entry.rule)
    assert ruled <= rules.keys(), ruled - rules.keys()
    for rule in rules.values():
        rule(translation)
    for leaf in translation.tree.leaves.values():
        translation.judge(leaf.key, Verdict.MISSING, "nothing is known of it beside these other keys")


def _apply(translation: Translation, leaf: Leaf, entry: Entry, verdict: Verdict) -> None:
    if entry.to is None or verdict not in (Verdict.CARRIED, Verdict.CHANGED):
        translation.judge(leaf.key, verdict, entry.note)
        return
    read: dict[str, Callable[[str], Any]] = {
        "integer": translation.integer,
        "number": translation.number,
        "boolean": translation.flag,
    }
    value = read.get(entry.kind or "", translation.get)(leaf.key)
    if leaf.key not in translation.verdicts and value is not None:
        translation.put(entry.to, value, leaf.key)
        translation.judge(leaf.key, verdict, entry.note, to=entry.to)
    translation.judge(leaf.key, Verdict.MEANINGLESS, "no value")


def _judge_unknown(translation: Translation, leaf: Leaf) -> None:
    """Judge a key that the system does not have, and name the one that may be meant."""
    table = translation.table
    if leaf.path[0].startswith(table.comments) and table.comments:
        translation.judge(leaf.key, Verdict.IGNORED_THERE, "a comment")
        return
    hint = None
    for depth in range(1, len(leaf.path) + 1):
        names = table.siblings(".".join(leaf.path[:depth]))
        if leaf.path[depth - 1] not in names:
            hint = did_you_mean(leaf.path[depth - 1], names) if names else None
            break
    hint = hint if hint is not None and hint.startswith("did you mean") else _elsewhere(table, leaf)
    note = table.said_of_unknown(leaf.key) + (f"; {hint}" if hint else "")
    verdict = table.verdict_of_unknown(leaf.key)
    translation.judge(leaf.key, verdict, note)
    if hint and verdict is Verdict.IGNORED_THERE:
        translation.problems.append(
            Problem(
                message=f"{leaf.shown}: {table.said_of_unknown(leaf.key)}",
                file=translation.tree.file,
                line=leaf.line,
                column=leaf.column,
                table=".".join(leaf.path[:-1]) or None,
                key=leaf.path[-1],
                severity="warning",
                hint=hint,
            )
        )


def _elsewhere(table: KeyTable, leaf: Leaf) -> str | None:
    """Return where the system reads a key of that name."""
    name = leaf.path[-1]
    homes = [key for key in table.entries if key.rpartition(".")[2] == name and len(name) > 2]
    return f"{table.title} reads {homes[0]}" if len(homes) == 1 else None
