"""Pieces of a batch that another group computes too: where gradients differ, a machine computes wrong and says nothing.

Kernels must be deterministic, as on the CPU; the same layout, samples and dropout then give the same bits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from composer3d.errors import ReplicaError
from composer3d.replicas import Exchange, ExchangeError
from composer3d.step.gradients import local

if TYPE_CHECKING:
    from torch import nn

    from composer3d.step.step_state import StepState

__all__ = ["Difference", "Replays", "culprits", "digest_of"]

_BYTES = 7  # of a digest: a signed integer of 64 bits holds it

log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """Two groups that have other gradients of one piece.

    Args:
        owner: Group whose piece it is.
        other: Group that computed it too.
    """

    owner: int
    other: int


def digest_of(parameters: Iterable[nn.Parameter]) -> int:
    """Return a digest of this rank's gradients, to the bit."""
    import torch

    digest = hashlib.blake2b(digest_size=_BYTES)
    for parameter in parameters:
        if parameter.grad is not None:
            values = local(parameter.grad.detach()).cpu().contiguous().view(-1)
            digest.update(values.view(torch.uint8).numpy().tobytes())
        digest.update(b"|")
    return int.from_bytes(digest.digest(), "little")


def culprits(differences: Sequence[Difference]) -> list[int]:
    """Return the groups that may compute wrong: one where all differences have it in common, else all of them.

    >>> culprits([Difference(1, 0), Difference(2, 1)]), culprits([Difference(1, 0)])
    ([1], [0, 1])
    """
    common = set.intersection(*(set(each) for each in differences))
    return sorted(common or {group for each in differences for group in each})


class Replays:
    """Comparisons of this group with those of which it computes pieces, and that compute its own.

    Args:
        every: Steps between two; None for never.
        exchange: With equal ranks of the other groups.
        group: This one.
        rank: Within it.
    """

    def __init__(self, every: int | None, exchange: Exchange, *, group: int, rank: int) -> None:
        self._every, self._exchange = every, exchange
        self._group, self._rank = group, rank
        self._found: list[Difference] = []  # of the last attempt of a batch
        self._differed = False
        self._num_differences = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of pieces that differed; nothing where none is computed twice."""
        return {} if self._every is None else {"replay_differences": float(self._num_differences)}

    def begin(self) -> None:
        """Begin a batch."""
        self._differed, self._found = False, []

    def is_due(self, step: int, members: Sequence[int]) -> bool:
        """Return whether groups compute pieces of each other in a step."""
        self._differed, self._found = bool(self._found), []
        return self._every is not None and step % self._every == 0 and len(members) > 1

    def agree(self, state: StepState, replayed: int, *, members: Sequence[int]) -> bool:
        """Return whether all groups have the same gradients; the same on equal ranks of all groups.

        A group that is lost meanwhile is found by the exchange that follows.

        Args:
            state: Of the step, with the gradients of this group's piece.
            replayed: Digest of the piece of the next member, computed here.
            members: Groups that take part.

        Collectives: one all-reduce over the groups of two numbers a group.
        """
        import torch

        size, place = len(members), members.index(self._group)
        digests = torch.zeros(2, size, dtype=torch.int64)
        digests[0, place], digests[1, (place + 1) % size] = digest_of(state.parameters()), replayed
        try:
            self._exchange.all_reduce(digests)
        except ExchangeError as error:
            log.debug("step %d: %s", state.step, error)
            return True
        differing = (digests[0] != digests[1]).nonzero().view(-1).tolist()
        self._found = [Difference(owner=members[piece], other=members[piece - 1]) for piece in differing]
        for owner, other in self._found:
            log.warning("step %d: groups %d and %d differ in a piece, on rank %d", state.step, owner, other, self._rank)
        self._num_differences += len(self._found)
        return not self._found

    def refuse(self, step: int) -> None:
        """End this group, if it may be the one that computes wrong, where a batch that was done again differed again.

        Raises:
            ReplicaError: It may be.
        """
        blamed = culprits(self._found) if self._found and self._differed else []
        if self._group in blamed:
            names = " or ".join(f"group {each}" for each in blamed)
            raise ReplicaError(
                f"step {step}, done twice: on rank {self._rank} groups have other gradients of the same samples, so "
                f"that the machine of that rank in {names} computes wrong; composer3d selftest on it, and drain what "
                "fails"
            )
