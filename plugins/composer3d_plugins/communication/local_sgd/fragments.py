"""Fragments: parameters that islands exchange together, in steps of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from composer3d import RunContext, select_fqns
from composer3d_plugins.communication.local_sgd.island_means import Total

__all__ = ["Fragment", "divided"]


@dataclass(kw_only=True, eq=False)
class Fragment:
    """Parameters that are exchanged together.

    Args:
        fqns: Of this rank's parameters.
        offset: Steps after those of the first fragment.
        started: Step in which the exchange in flight began; None where there is none.
        tokens: That this island has trained on since its last exchange of the fragment.
        wait: Waits for the exchange in flight; None where there is none.
    """

    fqns: list[str]
    offset: int
    started: int | None = None
    tokens: float = 0.0
    wait: Callable[[], Total] | None = None

    def total(self) -> Total | None:
        """Wait for the exchange in flight and return it; it stays in flight until it is applied."""
        if self.wait is None:
            return None
        found = self.wait()
        self.wait = lambda: found
        return found


def divided(fqns: Iterable[str], *, num: int, every: int, context: RunContext) -> list[Fragment]:
    """Return the fragments, whose blocks alternate: block i is in fragment i modulo their number.

    Args:
        fqns: Of the parameters; those of no block go with the first fragment.
        num: Of fragments.
        every: Steps between two exchanges of one.
        context: Of the run.
    """
    blocks = select_fqns(context.blocks, context.fqns) if num > 1 else []
    place = {fqn: index % num for index, fqn in enumerate(blocks)}
    held: list[list[str]] = [[] for _ in range(num)]
    for fqn in fqns:
        held[next((at for block, at in place.items() if fqn.startswith(f"{block}.")), 0)].append(fqn)
    offsets = (index * every // num for index in range(num))
    return [Fragment(fqns=fqns, offset=offset) for fqns, offset in zip(held, offsets, strict=True)]
