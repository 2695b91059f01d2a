"""Rules for random numbers that are not drawn as the mesh axes promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from composer3d.verification.causes.cause_wording import names_of, some
from composer3d.verification.verdict import Evidence

__all__ = ["streams"]

# By kind of `StreamFault`.
_SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "equal_over": "ranks along {axis} draw the same random numbers at {sites}, and hold other samples or features",
        "differs_over": "ranks along {axis} draw other random numbers at {sites}, and hold the same activations there",
        "recompute": "what is computed again in the backward draws other random numbers than the forward did, at "
        "{sites}: activation checkpointing without the state of the generator",
        "repeated": "micro-batches draw the same random numbers at {sites}",
        "steps": "every step draws the same random numbers at {sites} as the one before: something seeds them anew",
        "more": "random numbers are drawn at {sites} more often than on one device: something is dropped twice",
        "fewer": "random numbers are drawn at {sites} less often than on one device{where}: it is switched off there",
        "otherwise": "something is dropped at {sites} with another probability than on one device{where}",
        "none": "no rank draws random numbers at {sites}, and one device does: it is switched off, or taken out",
    }
)


def streams(evidence: Evidence) -> Iterator[str]:
    """Yield a sentence for each kind of violated rule, axis and set of ranks."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for fault in evidence.streams:
        is_there = fault.kind in ("fewer", "otherwise") and len(fault.ranks) < len(evidence.ranks)
        where = f" on {names_of(evidence, fault.ranks)}" if is_there else ""
        groups.setdefault((fault.kind, fault.axis, where), []).append(fault.site)
    for (kind, axis, where), sites in groups.items():
        yield _SENTENCES[kind].format(axis=axis, sites=some(sites), where=where)
