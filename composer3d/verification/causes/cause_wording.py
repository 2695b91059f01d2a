"""Names of parameters, modules and ranks in the sentences of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.verification.deviations import Deviation
from composer3d.verification.verdict import Evidence

__all__ = ["SHOWN", "first_gradients", "module_of", "pieces_of_ranks", "some"]

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
    step = evidence.first_wrong_step()
    return {} if step is None else evidence.wrong("gradients", step=step)


def pieces_of_ranks(evidence: Evidence, wrong: dict[str, list[Deviation]]) -> str:
    """Return a clause naming the ranks whose shards alone are wrong; empty where all are, or without shards."""
    found = {frozenset(rank for d in deviations for rank in d.pieces) for deviations in wrong.values()}
    if len(found) != 1 or not (ranks := sorted(found.pop())):
        return ""
    return ", only in the pieces of " + " and ".join(map(evidence.layout.who, ranks[:SHOWN]))
