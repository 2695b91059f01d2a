"""Layouts in numbers from manifests, and the changes to a manifest that make another layout of it.

Plugins say what they are to a layout (`composer3d_layout`) and which layouts they can make (`@plugin(offer=...)`), so
that those of other packages are searched, examined and proposed like built-in ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer3d.hooks import Hooks
from composer3d.interfaces import LayoutOffer, LayoutTraits
from composer3d.manifest import Manifest, inline
from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.registry import FAMILIES, Catalogue

__all__ = [
    "Offered",
    "choices_of",
    "degrees_of",
    "installed_offers",
    "patch",
    "setup_of",
    "shards_experts",
    "shards_sequences",
]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class Offered:
    """Layouts that an installed plugin can make.

    Args:
        family: Of the plugin.
        name: Of its table.
        offer: From its class.
    """

    family: str
    name: str
    offer: LayoutOffer


def installed_offers(manifest: Manifest) -> tuple[Offered, ...]:
    """Return the offers of the manifest's plugins and of all others that are installed, in the order of families.

    Of several plugins that can give a trait the same value, the manifest's own comes first, then the one whose
    distribution is composer3d's, then by name; the others are left out.

    Args:
        manifest: Typed; a plugin that it names by `use` offers under the name of its table.
    """
    own = {plugin.name: plugin.info for plugin in manifest.plugins}
    found = [Offered(family=info.family, name=name, offer=info.offer) for name, info in own.items() if info.offer]
    catalogue, others = Catalogue.installed(), []
    for name, _, info in catalogue.classes():
        if name not in own and info.offer is not None:
            others.append(Offered(family=info.family, name=name, offer=info.offer))
    others.sort(key=lambda offered: "(composer3d " not in catalogue.origin(offered.name))
    for offered in others:
        if not any(_overlap(offered.offer, other.offer) for other in found):
            found.append(offered)
    return tuple(sorted(found, key=lambda offered: (FAMILIES.index(offered.family), offered.name)))


def _overlap(one: LayoutOffer, other: LayoutOffer) -> bool:
    shared = one.choices.keys() & other.choices.keys()
    return any(set(one.choices[trait]) & set(other.choices[trait]) for trait in shared)


def choices_of(offers: Sequence[Offered], trait: str) -> tuple[Any, ...]:
    """Return the values that plugins can give a trait, each once."""
    return tuple(dict.fromkeys(value for offered in offers for value in offered.offer.choices.get(trait, ())))


def shards_sequences(offers: Sequence[Offered]) -> bool:
    """Return whether a plugin shards sequences where `cp` has several ranks."""
    return _shards_over("cp", offers)


def shards_experts(offers: Sequence[Offered]) -> bool:
    """Return whether a plugin shards experts, where a model has any and `ep` has several ranks."""
    return _shards_over("ep", offers)


def _shards_over(axis: str, offers: Sequence[Offered]) -> bool:
    tables = [[each.offer.table(LayoutTraits(), {axis: degree}) for degree in (1, 2)] for each in offers]
    return any(alone is None and several is not None for alone, several in tables)


def setup_of(manifest: Manifest, degrees: Mapping[str, int], *, num_models: int = 1) -> Setup:
    """Return what a manifest says, in numbers.

    Args:
        manifest: Typed, with the runner's tables.
        degrees: By axis, resolved.
        num_models: Islands and groups, whose ranks share the global batch with those of `degrees`.

    Raises:
        QueryError: Two plugins say different things of one trait.
    """
    traits = Hooks(manifest.plugins).layout(degrees)
    replicas = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    microbatch = manifest.train.microbatch or 1
    pp = degrees.get("pp", 1)
    return Setup(
        seq_len=manifest.tables["data"].seq_len,
        global_batch=manifest.train.batch_over(replicas * num_models) // num_models,
        microbatch=microbatch,
        dp_replicate=degrees.get("dp_replicate", 1),
        dp_shard=degrees.get("dp_shard", 1),
        cp=degrees.get("cp", 1),
        tp=degrees.get("tp", 1),
        pp=pp,
        ep=degrees.get("ep", manifest.degrees.get("ep") or 1),
        zero=traits.zero or 0,
        schedule=traits.schedule or "1F1B",
        stages_per_rank=(traits.stages_per_rank or 1) if pp > 1 else 1,
        sequence_parallel=bool(traits.sequence_parallel),
        recompute=traits.recompute or "none",
        kernels="compiled" if traits.is_compiled else "eager",
        precision=_precision(traits),
        offload=bool(traits.offloads_state),
        compression=traits.compression or "none",
    )


def _precision(traits: LayoutTraits) -> Precision:
    """Return the bytes of a parameter: float32 weights and optimizer state, and what plugins change of it."""
    compute = traits.compute_dtype or "float32"
    size = _BYTES.get(compute, 2)
    return Precision(
        dtype=traits.product_dtype or compute,
        compute_bytes=size,
        gather_bytes=size if traits.gather_bytes is None else traits.gather_bytes,
        reduce_bytes=_BYTES.get(traits.reduce_dtype or "float32", 4),
        state_bytes=8 if traits.state_bytes is None else traits.state_bytes,
    )


def degrees_of(setup: Setup) -> dict[str, int]:
    """Return a layout's degrees by axis."""
    return {axis: getattr(setup, axis) for axis in _AXES}


def _traits_of(setup: Setup) -> LayoutTraits:
    """Return what plugins have to make for a layout."""
    dtype = setup.precision.dtype
    narrow = {2: "bfloat16", 4: "float32", 8: "float64"}.get(int(setup.precision.compute_bytes))
    return LayoutTraits(
        zero=setup.zero,
        schedule=setup.schedule,
        stages_per_rank=setup.stages_per_rank,
        sequence_parallel=setup.sequence_parallel,
        recompute=setup.recompute,
        is_compiled=setup.kernels == "compiled",
        offloads_state=setup.offload,
        compression=setup.compression,
        compute_dtype=dtype if dtype in _BYTES else narrow,
        product_dtype=None if dtype in _BYTES else dtype,
    )


def patch(manifest: Manifest, own: Setup, setup: Setup, offers: Sequence[Offered]) -> tuple[str, ...]:
    """Return what `--set` has to say for a manifest to become another layout; only what differs.

    Args:
        manifest: The given one.
        own: It in numbers.
        setup: What is wanted.
        offers: Of plugins, from `installed_offers`.
    """
    there = {plugin.name for plugin in manifest.plugins}
    stated = manifest.degrees
    changes = [
        f"mesh.{axis}={getattr(setup, axis)}"
        for axis in _AXES
        if stated.get(axis) != getattr(setup, axis) and (axis in stated or getattr(setup, axis) > 1)
        if not (stated.get(axis) is None and getattr(setup, axis) == 1)
    ]
    if setup.microbatch != own.microbatch:
        changes.append(f"train.microbatch={setup.microbatch}")
    if manifest.train.accumulate is not None:
        if setup.num_microbatches != manifest.train.accumulate:
            changes.append(f"train.accumulate={setup.num_microbatches}")
    elif manifest.train.global_batch is None and setup.microbatch * setup.data_parallel != setup.global_batch:
        changes.append(f"train.global_batch={setup.global_batch}")
    experts, before_experts = (_expert_degree(own, each) for each in (setup, own))
    changes += [f"mesh.ep={experts}"] if experts != (stated.get("ep") or 1) else []
    for offered in offers:
        table = offered.offer.table(_traits_of(setup), {**degrees_of(setup), "ep": experts})
        known = {**degrees_of(own), "ep": before_experts}
        before = offered.offer.table(_traits_of(own), known) if offered.name in there else None
        changes += _table_changes(f"{offered.family}.{offered.name}", table, before, is_there=offered.name in there)
    return tuple(changes)


def _expert_degree(own: Setup, setup: Setup) -> int:
    """Return over how many ranks a layout shards experts: as it says, as far as that divides dp_shard x cp.

    The given manifest's may be taken from tp too, and stay so where its degrees do.

    What ZeRO divides is the same then: a rank has experts / ep, and of those one of (dp_shard x cp / ep) shards.
    """
    if setup.ep == own.ep and degrees_of(setup) == degrees_of(own):
        return own.ep
    return math.gcd(setup.ep, setup.dp_shard * setup.cp)


def _table_changes(
    path: str, table: Mapping[str, Any] | None, before: Mapping[str, Any] | None, *, is_there: bool
) -> list[str]:
    """Return the changes of one plugin's table, which has the keys of the given layout already."""
    if table is None:
        return [f"{path}=false"] if is_there else []
    if not table:
        return [] if is_there else [f"{path}={{}}"]
    known = before or {}
    return [f"{path}.{key}={inline(value)}" for key, value in table.items() if key not in known or known[key] != value]
