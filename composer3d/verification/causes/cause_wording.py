"""Names of parameters, modules and ranks in the sentences of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer3d.verification.evidence.deviations import Deviation
from composer3d.verification.verdict import Evidence

__all__ = ["SHOWN", "first_gradients", "module_of", "names_of", "pieces_of_ranks", "some"]

SHOWN = 4


def some(fqns: Sequence[str]) -> str:
    """Return the first few names, and the number of others."""
    more = f" and {len(fqns) - SHOWN} more" if len(fqns) > SHOWN else ""
    return ", ".join(fqns[:SHOWN]) + more


def module_of(fqn: str) -> str:
    """Return the module that has a parameter."""
    return fqn.rpartition(".")[0] or "the root"


def first_gradients(evidence: Evidence) -> dict[str, list[Deviation]]:
    """Return the wrong gradients of the first step that has any, where nothing is wrong before them."""
    step = evidence.first_wrong_step("gradients")
    return {} if step is None else evidence.wrong("gradients", step=step)


def pieces_of_ranks(evidence: Evidence, wrong: Mapping[str, Sequence[Deviation]]) -> str:
    """Return a clause naming the ranks whose shards alone are wrong, and the wrong rows if their shards have more.

    Empty where all shards are wrong, or without shards.
    """
    shards = {fqn: [d.shards for d in found if d.shards is not None] for fqn, found in sorted(wrong.items())}
    found = {fqn: frozenset(rank for shard in those for rank in shard.ranks) for fqn, those in shards.items()}
    ranks = sorted(set().union(*found.values()))
    if not found or not all(found.values()) or (len(set(found.values())) > 1 and len(ranks) == len(evidence.ranks)):
        return ""
    rows = {fqn: shard.rows for fqn, those in shards.items() for shard in those if shard.rows is not None}
    shown = some([_row(fqn, *span) for fqn, span in rows.items()]) if rows.keys() == wrong.keys() else ""
    return f", only in the pieces of {names_of(evidence, ranks)}{': ' if shown else ''}{shown}"


def names_of(evidence: Evidence, ranks: Sequence[int]) -> str:
    """Return the first few ranks, each with its place in the mesh."""
    return " and ".join(map(evidence.layout.who, ranks[:SHOWN]))


def _row(fqn: str, first: int, last: int) -> str:
    return f"row {first} of {fqn}" if first == last else f"rows {first} to {last} of {fqn}"
