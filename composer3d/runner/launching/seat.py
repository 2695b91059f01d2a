"""The machine that serves the membership of a run: with which others, and whether another one serves by now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from composer3d.runner.launching.terms import Term, Terms

__all__ = ["Fenced", "Seat"]

_CHECK_S = 1.0


class Fenced(Exception):
    """Another machine serves the run, or it has ended: this one was taken for lost."""

    def of(self, node: int) -> str:
        """Return the report of a machine."""
        return f"this machine, node {node}, was taken for lost, and the others go on without it: {self}"

    @property
    def advice(self) -> str:
        """Advice for the user."""
        return "start this machine again with the same command: it takes part again, if the run goes on"


class Seat:
    """A term of this machine, and those that follow while it serves.

    Args:
        terms: Of the run.
        term: That this machine has claimed.
    """

    def __init__(self, terms: Terms, term: Term) -> None:
        self.terms, self.term = terms, term
        self._check_at = 0.0

    def change(self, members: Mapping[int, str]) -> None:
        """Begin another term with other machines: one came, or the run goes on without one.

        Args:
            members: By their numbers; with this one.

        Raises:
            Fenced: Another machine has begun it.
        """
        following = replace(self.term, number=self.term.number + 1, members=dict(members))
        try:
            is_claimed = self.terms.claim(following)
        except FileNotFoundError:
            raise Fenced("the run has ended, or was begun again") from None
        if not is_claimed:
            raise Fenced(str(self.terms.after(self.term.number)))
        self.term = following

    def admit(self, node: int, identity: str) -> dict[str, int]:
        """Count on a machine that came; return what it is told of who serves.

        Args:
            node: Its number.
            identity: Of its process.
        """
        if self.term.members.get(node) != identity:
            self.change({**self.term.members, node: identity})
        return {"node": self.term.node, "term": self.term.number}

    def left(self, *nodes: int) -> None:
        """Go on without machines."""
        if not set(nodes) & set(self.term.members):
            return
        self.change({node: name for node, name in self.term.members.items() if node not in nodes})

    def check(self) -> None:
        """Look, once in a while, whether another machine serves.

        Raises:
            Fenced: It does.
        """
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        later = self.terms.after(self.term.number)
        if later is not None:
            raise Fenced(str(later))
        if self.terms.are_over:
            raise Fenced("the run has ended, or was begun again")
