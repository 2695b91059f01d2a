"""What makes two ranks run the same thing: the manifest and the plan as one number, compared before meshes are made."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError

if TYPE_CHECKING:
    from composer3d.preparation import Preparation

__all__ = ["agree_on_plan", "described", "fingerprint"]

# What may differ between machines: where things lie there, and what is shown.
_LOCAL = ("run", "data.use")
_SHOWN = 4


def described(preparation: Preparation) -> dict[str, str]:
    """Return everything that ranks must have in common, as JSON text by dotted key.

    Typed tables, so that a default that is written out is the default; and the modules each transform selected on the
    whole model. `[run]` and `data.use` are left out: paths, and what is shown, may differ between machines.
    """
    manifest = preparation.context.manifest
    tables = {name: table for name, table in manifest.tables.items() if name not in _LOCAL}
    found = dict(_leaves(tables))
    for registered in preparation.hooks.plugins:
        prefix = f"{registered.info.family}.{registered.name}"
        found[prefix] = type(registered.instance).__qualname__
        found |= _leaves(registered.instance, prefix)
    for transform, fqns in preparation.selected:
        found[f"plan.{transform.name}"] = json.dumps([transform.phase.name, *fqns])
    found["mesh"] = str(preparation.context.layout)
    return {key: text for key, text in sorted(found.items()) if key not in _LOCAL}


def fingerprint(what: Mapping[str, str]) -> int:
    """Return 40 bits of what `described` returned."""
    return int.from_bytes(hashlib.blake2b(json.dumps(dict(what)).encode(), digest_size=5).digest(), "big")


def agree_on_plan(preparation: Preparation) -> int:
    """Compare manifest and plan of all ranks, and return their number for the guard of the steps.

    Before the mesh is made: ranks of other degrees would wait for each other in process groups that do not match.

    Raises:
        StepError: Ranks differ; names them, and the keys with both values.

    Collectives: one all-gather of a number, one more of the manifests where they differ.
    """
    import torch.distributed as dist

    context = preparation.context
    own = described(preparation)
    number = fingerprint(own)
    if context.world_size == 1 or dist.get_backend() == "fake":
        return number
    numbers: list[Any] = [None] * context.world_size
    dist.all_gather_object(numbers, number)
    usual = Counter(numbers).most_common(1)[0][0]
    odd = [rank for rank, other in enumerate(numbers) if other != usual]
    if odd:
        everything: list[Any] = [None] * context.world_size
        dist.all_gather_object(everything, own)
        first = numbers.index(usual)
        ranks = ", ".join(context.layout.who(rank) for rank in odd[:_SHOWN])
        raise StepError(
            f"{ranks} {'runs' if len(odd) == 1 else 'run'} another manifest than rank {first}: "
            f"{_difference(everything[odd[0]], everything[first], odd[0], first)}; "
            "start all ranks with the same manifest, overrides and plugins"
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


def _leaves(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of nested dataclasses and mappings as JSON text by dotted key."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _leaves(item, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: json.dumps(value, default=str)}
