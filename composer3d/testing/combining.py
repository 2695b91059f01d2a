"""Rows in which every two options of all plugins stand together, but for those that are refused together.

What is refused is not known beforehand. Rows are made, each is put to `check`, and of a row that is refused the choices
that are to blame are found: the rest of the matrix is then made without them. So a refusal hides no other pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from composer3d.testing.covering import pairwise
from composer3d.testing.plugin_options import DEFAULT, OFF, ON, Options, Row, plugin_of

__all__ = ["Combined", "Refused", "combine", "uncovered"]

# Fewer than `pairwise` takes by itself: there are many options here, and a row more costs less than a search.
_NUM_BEGINNINGS = 4

Choices: TypeAlias = frozenset[tuple[str, str]]
# Says why `check` refuses a row: one reason for each problem, empty where it is fine.
Check: TypeAlias = Callable[[Row], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Choices that are refused together, whatever else a row has.

    Args:
        choices: (key, value); off and defaults are among them where another value would do.
        reason: As `check` said.
    """

    choices: Choices
    reason: str


@dataclass(frozen=True, kw_only=True)
class Combined:
    """A covering set.

    Args:
        rows: Every one passes `check`.
        refused: What no row has.
    """

    rows: tuple[dict[str, str], ...]
    refused: tuple[Refused, ...]


def combine(
    options: Options,
    *,
    check: Check,
    owners: Mapping[str, Sequence[str]],
    axes: Sequence[str] | None = None,
    max_ranks: int = 8,
    known: Iterable[Refused] = (),
    begin: Sequence[Row] = (),
    note: Callable[[str], None] = lambda text: None,
    learned: Callable[[Sequence[Refused]], None] = lambda refused: None,
) -> Combined:
    """Return rows such that any two values of any two options stand together in one that `check` lets pass.

    Args:
        options: From `installed_options`, and others; of each key the neutral value first.
        check: Asked for every row; it should take a fraction of a second.
        owners: From `owners_of`: an axis above 1 needs one of them.
        axes: From `multiplied_axes`; None: all that the options have.
        max_ranks: Of a row's world.
        known: Refusals that were found before, which saves finding them.
        begin: Rows that were made before, the ones to keep first; of what can no longer be, an option that is to blame
            becomes its default, and what then cannot be is made again.
        note: Told how far it is.
        learned: Handed all refusals that are known, whenever there are more.

    Returns:
        The same for the same arguments.
    """
    found = list(known)
    # Whole plugins first: what is refused is mostly between them, and is then seen before their options are chosen.
    # On is preferred to off: a plugin that is off takes all its options out of a row.
    ordered = {
        key: tuple(reversed(options[key])) if options[key] == (OFF, ON) else options[key]
        for key in sorted(options, key=lambda key: plugin_of(key) is not None)
    }
    kept = [{key: row[key] for key in ordered} for row in begin if row.keys() == options.keys()]
    while True:
        excluded = excluder(options, owners=owners, axes=axes, max_ranks=max_ranks, refused=found)
        rows = pairwise(ordered, excluded=excluded, beginnings=_NUM_BEGINNINGS, begin=_mended(kept, found))
        new: list[Refused] = []
        for row in rows:
            explained = {refusal.reason for refusal in new if _stands_in(refusal.choices, row)}
            for reason in (reason for reason in check(row) if reason not in explained):
                new.append(explain(row, reason, options, check, owners))
                note(f"{reason}: {' '.join(f'{key}={value}' for key, value in sorted(new[-1].choices))}")
        note(f"{len(rows)} rows, {len(found)} refusals known, {len(new)} new")
        if not new:
            return Combined(rows=tuple(rows), refused=tuple(found))
        found += new
        learned(found)


def _mended(rows: Sequence[Row], refused: Sequence[Refused]) -> list[Row]:
    """Return rows without what is refused, as they were but for an option each; those that stay as they are first."""
    whole: list[Row] = []
    mended: list[Row] = []
    for row in rows:
        found = row
        for refusal in refused:
            options = [key for key, value in refusal.choices if plugin_of(key) and value not in (OFF, DEFAULT)]
            if options and _stands_in(refusal.choices, found):
                found = {**found, max(options): DEFAULT}
        (whole if found is row else mended).append(found)
    return [*whole, *mended]


def excluder(
    options: Options,
    *,
    owners: Mapping[str, Sequence[str]],
    axes: Sequence[str] | None,
    max_ranks: int,
    refused: Iterable[Refused],
) -> Callable[[Mapping[str, Any]], bool]:
    """Return what tells rows, complete or not, that cannot be."""
    conflicts = [refusal.choices for refusal in refused]
    multiplied = [key for key in options if key.startswith("mesh.")] if axes is None else axes
    plugins = {key: plugin for key in options if (plugin := plugin_of(key)) is not None}

    def excluded(row: Mapping[str, Any]) -> bool:
        # What an option says of its plugin holds before the plugin's own turn comes: a search that went on until then
        # would try everything in between. So does what refusals leave over.
        implied: dict[str, Any] = dict(row)
        for key, value in row.items():
            plugin = plugins.get(key)
            state = OFF if value == OFF else ON
            if plugin is not None and implied.setdefault(plugin, state) != state:
                return True
        if math.prod(int(row.get(axis, 1)) for axis in multiplied) > max_ranks:
            return True
        shared = [owning for axis, owning in owners.items() if row.get(axis, "1") != "1"]
        for owning in shared:
            left = [owner for owner in owning if implied.get(owner, ON) != OFF]
            if len(left) == 1:
                implied[left[0]] = ON
        # An owner may be what refusals leave out.
        return not _propagate(implied, conflicts, options, plugins) or any(
            all(implied.get(owner, ON) == OFF for owner in owning) for owning in shared
        )

    return excluded


def _propagate(
    implied: dict[str, Any], conflicts: Sequence[Choices], options: Options, plugins: Mapping[str, str]
) -> bool:
    """Choose what refusals leave no other value for; False where one of them cannot be avoided."""
    while True:
        forbidden: dict[str, set[str]] = {}
        for choices in conflicts:
            left = None
            for key, value in choices:
                given = implied.get(key)
                if given is None and left is None:
                    left = (key, value)
                elif given != value:
                    break
            else:
                if left is None:
                    return False
                forbidden.setdefault(left[0], set()).add(left[1])
        changed = False
        for key, values in forbidden.items():
            plugin = implied.get(plugins.get(key, ""))
            possible = [
                value
                for value in options[key]
                if value not in values and (plugin is None or (plugin == OFF) == (value == OFF))
            ]
            if not possible:
                return False
            if len(possible) == 1:
                implied[key] = possible[0]
                changed = True
        if not changed:
            return True


def explain(row: Row, reason: str, options: Options, check: Check, owners: Mapping[str, Sequence[str]]) -> Refused:
    """Find the choices of a refused row that are to blame.

    First everything goes that may: a plugin is switched off, an option is given its neutral value, as long as the
    reason stays. Then each choice that is left counts, if the reason goes with another value of it and no new one
    comes.

    Args:
        row: Refused.
        reason: Why.
        options: All values.
        check: As for `combine`.
        owners: As for `combine`.
    """
    small = _shrunk(dict(row), reason, options, check, owners)
    blamed = set()
    for key, value in small.items():
        plugin = plugin_of(key)
        if plugin is not None and small[plugin] == OFF:
            continue
        others = (_changed(small, key, other, options) for other in options[key] if other != value)
        said = [check(other) for other in others if _is_whole(other, owners)]
        if _counts(reason, said, check(small), neutral=value in (options[key][0], DEFAULT)):
            blamed.add((key, value))
    # The row's own values: another one than the neutral may be refused for the same reason.
    told = {plugin_of(key) for key, _ in blamed}  # an option says that its plugin is on
    own = {key: row[key] for key, _ in blamed if key not in told}
    restored = dict(small)
    for key in sorted(own, key=lambda key: plugin_of(key) is not None):
        restored = _changed(restored, key, own[key], options) if restored[key] != own[key] else restored
    holds = bool(own) and _is_whole(restored, owners) and reason in check(restored)
    return Refused(choices=frozenset((own if holds else row).items()), reason=reason)


def _counts(reason: str, others: Sequence[Sequence[str]], own: Sequence[str], *, neutral: bool) -> bool:
    """Return whether a choice is to blame, from what is said of the rows that have another value in its place.

    A reason may be gone because a new one came before it, which says nothing of the value. A choice that is not neutral
    is to blame there, since it could not be neutralised, even if another value is refused for the same reason.
    """
    gone = [said for said in others if reason not in said]
    if any(set(said) <= set(own) for said in gone):
        return True
    return not neutral and bool(gone)


def _shrunk(
    row: dict[str, str], reason: str, options: Options, check: Check, owners: Mapping[str, Sequence[str]]
) -> Row:
    """Neutralise as much of a row as may go while the reason stays: halves of it, then ever smaller parts.

    An axis goes with its owners at first: one of them without the other would be refused for a reason of its own.
    """

    def without(keys: Iterable[str]) -> dict[str, str]:
        candidate = row
        for key in keys:
            neutral = DEFAULT if plugin_of(key) and row[key] != OFF else options[key][0]
            if candidate[key] != neutral:
                candidate = _changed(candidate, key, neutral, options)
        stays = candidate != row and _is_whole(candidate, owners) and reason in check(candidate)
        return candidate if stays else row

    for axis, owning in owners.items():
        if axis in options:
            row = without((axis, *(key for key in owning if key in options)))
    for keys in ([key for key in options if plugin_of(key) is None], [key for key in options if plugin_of(key)]):
        size = len(keys)
        while size:
            for start in range(0, len(keys), size):
                row = without(keys[start : start + size])
            size //= 2
    return row


def uncovered(options: Options, rows: Sequence[Row]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Return the pairs of choices that stand together in no row."""
    wanted = {
        ((one, first), (other, second))
        for one, other in combinations(options, 2)
        for first in options[one]
        for second in options[other]
    }
    return wanted - {pair for row in rows for pair in combinations([(key, row[key]) for key in options], 2)}


def _stands_in(choices: Choices, row: Mapping[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in choices)


def _changed(row: Row, key: str, value: str, options: Options) -> dict[str, str]:
    """Return the row with another value; a plugin takes its options with it, and brings them at their defaults."""
    result = {**row, key: value}
    for other in options:
        if plugin_of(other) == key:
            result[other] = OFF if value == OFF else DEFAULT
    return result


def _is_one_change(row: Row, key: str) -> bool:
    """Return whether a changed row is a row: an option cannot be off while its plugin is on."""
    plugin = plugin_of(key)
    return plugin is None or (row[plugin] == OFF) == (row[key] == OFF)


def _is_whole(row: Row, owners: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a row has an owner for every axis above 1, and its options are those of its plugins."""
    options = all(_is_one_change(row, key) for key in row)
    return options and all(
        row[axis] == "1" or any(row.get(owner) == ON for owner in keys) for axis, keys in owners.items()
    )
