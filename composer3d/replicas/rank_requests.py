"""The requests of a rank to the membership, of which one at a time has no answer, across servers that are lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer3d.replicas.membership import NOTHING
from composer3d.replicas.resumption import Resolution, Standing

__all__ = ["RankRequests"]


class RankRequests:
    """Requests of a rank and their answers, as it states them to a server that takes over; without sockets.

    Args:
        group: Of the rank.

    Attributes:
        standing: What it knows.
        pending: The request that has no answer yet.
        has_greeted: Whether a server has let it in.
        is_out: Whether it was told that its group takes no part any more.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self.standing = Standing()
        self.pending: Mapping[str, Any] | None = None
        self.has_greeted = self.is_out = False

    def make(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Note a request that is to be sent; return its answer, where a server that took over has given it already."""
        kind = message["do"]
        if kind == "ask" and self.standing.has_state != (message["step"] != NOTHING):
            self.standing = replace(self.standing, has_state=message["step"] != NOTHING)
        elif kind == "vote" and self.standing.commit is not None:
            return {"commit": self.standing.commit}
        elif kind == "vote":
            self.standing = replace(self.standing, voted=bool(message["ok"]))
        self.pending = message
        return None

    def take(self, answer: Mapping[str, Any]) -> None:
        """Note an answer."""
        self.pending = None
        self.is_out |= "out" in answer or "refused" in answer
        if "has_begun" in answer:
            self.has_greeted = True
            resolution = Resolution.from_json(answer.get("resolution"))
            self.standing = Standing(has_state=not answer["has_begun"], resolution=resolution)
        elif "spare" in answer:
            self.standing = replace(self.standing, has_state=False)
        elif "members" in answer:
            self.standing = Standing(
                round=int(answer["round"]),
                epoch=int(answer["epoch"]),
                has_state=self.standing.has_state and self._group not in answer["behind"],
                resolution=self.standing.resolution,
            )
        elif "commit" in answer:
            self._decided(commit=bool(answer["commit"]))

    def resume(self, found: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Note the first message of a server that has taken over.

        Returns:
            The answer to the request that waits; None where nothing waits, or what is `pending` is to be sent again.
        """
        resolution = Resolution.from_json(found.get("resumed"))
        if resolution is None:  # the answer to a first greeting, or this rank is out
            self.take(found)
            return found
        if self.standing.commit is None and 0 < self.standing.round <= resolution.round:
            self._decided(commit=resolution.commit)
        self.standing = replace(self.standing, resolution=resolution)
        if self.pending is None or self.pending["do"] not in ("vote", "get"):
            return None
        is_vote, self.pending = self.pending["do"] == "vote", None
        return {"commit": self.standing.commit} if is_vote else {"value": None}

    def _decided(self, *, commit: bool) -> None:
        """Note whether the round counts: then a group that was given the state has it."""
        self.standing = replace(self.standing, commit=commit, has_state=commit or self.standing.has_state)
