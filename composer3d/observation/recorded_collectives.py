"""Collectives of torch's flight recorders, read: their axis, sequence number, sizes and issuer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from composer3d.observation.hang_report import RecordedCollective
from composer3d.observation.issuers import issuer_of

__all__ = ["KEPT", "Groups", "collectives"]

KEPT = 64  # collectives of each group that a rank tells of
_CHECKPOINT = "composer3d_checkpoint"  # the group of saves in the background: a rank does not wait there

Groups = Mapping[str, tuple[str, tuple[int, ...]]]  # by a process group's name: its axis and its ranks


def collectives(
    entries: Sequence[Mapping[str, Any]],
    groups: Groups,
    *,
    others: Groups = MappingProxyType({}),
    kept: int = KEPT,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> list[RecordedCollective]:
    """Read a flight recorder's entries, oldest first; only the last ones of each group are kept.

    Args:
        entries: As torch writes them in JSON, perhaps with the `frames` of their calls; gloo's and NCCL's are alike.
        groups: Axis and ranks by name of the process group.
        others: The same of groups that are no axis' own.
        kept: Most collectives per group.
        sources: Plugins by their source, as of `issuers.sources_of`.
    """
    groups = {**others, **groups}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in sorted(entries, key=lambda entry: (int(entry["time_created_ns"]), int(entry["record_id"]))):
        name, described = entry["process_group"]
        if name not in groups or described == _CHECKPOINT or entry.get("is_p2p"):
            continue
        found.setdefault(f"{name} {entry['profiling_name'].partition(':')[0]}", []).append(entry)
    newest = [_read(entry, groups, others, sources) for rows in found.values() for entry in rows[-kept:]]
    return sorted(newest, key=lambda collective: collective.time_ns)


def _read(entry: Mapping[str, Any], groups: Groups, others: Groups, sources: Mapping[str, str]) -> RecordedCollective:
    name = entry["process_group"][0]
    axis, ranks = groups[name]
    backend, _, op = entry["profiling_name"].partition(":")
    issuer = issuer_of(entry.get("frames", ()), sources)
    return RecordedCollective(
        axis=axis,
        ranks=ranks,
        number=int(entry["collective_seq_id"]),
        op=op.lstrip("_").removesuffix("_base"),
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        time_ns=int(entry["time_created_ns"]),
        dtypes=tuple(entry["input_dtypes"]),
        backend=backend,
        group=name if name in others else "",
        pending=not entry["retired"] and entry["state"] != "completed",
        issuer=None if issuer is None else issuer.name,
        caller="" if issuer is None else issuer.caller,
    )
