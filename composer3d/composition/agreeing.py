"""Agreement of all ranks on manifest and plan: one fingerprint, compared before the mesh is made."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from composer3d.composition.own_sources import own_sources
from composer3d.errors import StepError
from composer3d.processes.json_exchange import all_gather_json
from composer3d.processes.versions import installed_version

if TYPE_CHECKING:
    from composer3d.composition.preparing import Preparation
    from composer3d.mesh import Layout

__all__ = ["agree", "agree_on_plan", "described", "fingerprint", "leaves"]

# These may differ between machines: paths, and the display.
_LOCAL = ("run", "data.use")
_SHOWN = 4


def described(preparation: Preparation) -> dict[str, str]:
    """Return everything that ranks must have in common, as JSON text by dotted key.

    Typed tables, so that a default that is written out is the default; the modules that each transform selected on the
    whole model; the versions of composer3d and torch; and on several machines the code of the user's own modules (see
    `own_sources`). `[run]` and `data.use` are left out: paths, and the display,
    may differ between machines; the data found there is compared by its reader, with `agree`.
    """
    manifest = preparation.context.manifest
    tables = {name: table for name, table in manifest.tables.items() if name not in _LOCAL}
    found = dict(leaves(tables))
    for registered in preparation.hooks.plugins:
        prefix = f"{registered.info.family}.{registered.name}"
        found[prefix] = type(registered.instance).__qualname__
        found |= leaves(registered.instance, prefix)
    for transform, fqns in preparation.selected:
        found[f"plan.{transform.name}"] = json.dumps([transform.phase.name, *fqns])
    found["mesh"] = str(preparation.context.layout)
    found |= {f"version.{name}": installed_version(name) for name in ("composer3d", "torch")}
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < preparation.context.layout.world_size:  # others have other disks
        texts = map(json.loads, leaves(manifest.document.tables).values())
        found |= {f"source.{name}": text for name, text in own_sources(preparation.model, texts).items()}
    return {key: text for key, text in sorted(found.items()) if key not in _LOCAL}


def fingerprint(what: Mapping[str, str]) -> int:
    """Return 40 bits of what `described` returned."""
    return int.from_bytes(hashlib.blake2b(json.dumps(dict(what)).encode(), digest_size=5).digest(), "big")


def agree_on_plan(preparation: Preparation) -> int:
    """Compare manifest and plan of all ranks, and return their fingerprint for the step guard.

    Before the mesh is made: ranks of other degrees would wait for each other in process groups that do not match.

    Raises:
        StepError: Ranks differ; names them, and the keys with both values.

    Collectives: one all-gather of a number, one more of the manifests where they differ.
    """
    return agree(
        described(preparation),
        layout=preparation.context.layout,
        what=("runs another manifest", "run another manifest"),
        advice="start all ranks with the same manifest, overrides, plugins, versions and code",
    )


def agree(own: Mapping[str, str], *, layout: Layout, what: tuple[str, str], advice: str) -> int:
    """Compare values that all ranks must have in common, and return their fingerprint.

    Args:
        own: This rank's values, JSON text by dotted key; keys that begin with `plan.` follow from the others.
        layout: Gives ranks their coordinates.
        what: Verb phrases for the message, of one rank that differs and of several.
        advice: How to mend the difference, for the message.

    Raises:
        StepError: Ranks differ; names them, and the keys with both values.

    Collectives: one all-gather of a number, one more of everything where ranks differ.
    """
    number = fingerprint(own)
    if layout.world_size == 1:
        return number
    numbers = all_gather_json(number)
    usual = Counter(numbers).most_common(1)[0][0]
    odd = [rank for rank, other in enumerate(numbers) if other != usual]
    if odd:
        everything = all_gather_json(own)
        first = numbers.index(usual)
        ranks = ", ".join(layout.who(rank) for rank in odd[:_SHOWN]) + (
            f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
        )
        raise StepError(
            f"{ranks} {what[len(odd) > 1]} than rank {first}: "
            f"{_difference(everything[odd[0]], everything[first], odd[0], first)}; {advice}"
        )
    return number


def _difference(one: Mapping[str, str], other: Mapping[str, str], rank: int, first: int) -> str:
    keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    # The plan follows from the rest, so it is shown only where nothing else differs.
    shown = [key for key in keys if key != "mesh" and not key.startswith("plan.")] or keys
    parts = [
        f"{key} is {_short(one.get(key))} on rank {rank} and {_short(other.get(key))} on rank {first}"
        for key in shown[:_SHOWN]
    ]
    return ", ".join(parts) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _short(text: str | None) -> str:
    return "not there" if text is None else text if len(text) <= 60 else f"{text[:57]}..."


def leaves(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested dataclasses and mappings as JSON text by dotted key."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= leaves(item, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: json.dumps(value, default=str)}
