"""Codecs on the wire, and the stash of the collectives that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "AllReduce",
    "Codec",
    "CodedCollectives",
    "CodedExchange",
    "Held",
    "InPlaceCodec",
    "ReplicaReduction",
    "ReplicaReductions",
]

# A module and the name that it has for one of its parameters: tensors change, while units gather and materialise them.
Held = tuple["nn.Module", str]
# Takes a buffer of gradients, N, with parameters and their gradients, views of it that may leave padding out, in an
# order that is the same in every run, and the process group of replicas; puts the mean over replicas in its place.
AllReduce = Callable[["Tensor", Sequence[tuple[Held, "Tensor"]], Any], None]


class Codec(Protocol):
    """Lossy form of floating-point tensors on the wire, by rows; shapes: R rows of N elements, P bytes of a payload.

    Attributes:
        is_repeatable: Whether the same elements always have the same payload; stochastic rounding has another each
            time.
    """

    @property
    def is_repeatable(self) -> bool:
        """Whether the same elements always have the same payload."""

    def num_bytes(self, length: int) -> int:
        """Return P for rows of N = `length` elements: the size of a payload depends on nothing else."""

    def encode(self, x_RN: Tensor, /) -> Tensor:
        """Return the payloads, uint8 RP."""

    def decode(self, payload_RP: Tensor, length: int, /) -> Tensor:
        """Return the elements, float32 RN; payloads are contiguous."""

    def bound(self, x_RN: Tensor, /) -> Tensor:
        """Return the largest error that decoding may leave in each element, RN."""


@runtime_checkable
class InPlaceCodec(Codec, Protocol):
    """A codec that decodes into memory of its caller's: without it memory is taken for what is decoded, and copied."""

    def decode_into(self, payload_RP: Tensor, out_RN: Tensor, /, *, add: bool = False) -> None:
        """Write what `decode` returns into float32 RN, or add it to what is there, with the bits of that sum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedExchange:
    """A collective with a codec on the wire, as `verify` tries it.

    Args:
        what: "gradients": every rank gives a row, N, to each of W ranks, and is given the sum of its rows. "weights":
            every rank gives a row and is given all. "replicas": every rank gives a row and is given their mean: each of
            W chunks, the last one filled up with zeros, is encoded for one rank, decoded and added there, divided by W,
            and encoded for all.
        codec: Of rows; None where replicas exchange something else, of which `run` and `rounds` are all that is tried.
        group: Process group of W ranks.
        run: Given this rank's rows, WN, returns their sum, N; or given its row, N, returns those of all ranks, WN, or
            of replicas their mean, N.
        lengths: Values of N that were exchanged.
        rounds: Of error feedback: returns an exchange of replicas that begins with nothing left over; given this rank's
            row it returns the mean, and what this rank has left over: means, and the mean of what is left over at last,
            add up to the true means.
        name: For people; empty takes that of the codec.
    """

    what: Literal["gradients", "weights", "replicas"]
    codec: Codec | None
    group: Any
    run: Callable[[Tensor], Tensor]
    lengths: set[int] = field(default_factory=set)
    rounds: Callable[[], Callable[[Tensor], tuple[Tensor, Tensor]]] | None = None
    name: str = ""


@dataclass(kw_only=True, eq=False)
class CodedCollectives:
    """Stash of collectives that change numbers on purpose: `context.stash(CodedCollectives)`.

    Attributes:
        is_exact: Plugins are to send everything as it is: `verify` proves the run so, and every codec by itself.
        exchanges: By what travels and the name of the process group, once they have happened.
    """

    is_exact: bool = False
    exchanges: dict[tuple[str, str], CodedExchange] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaReduction:
    """An all-reduce of gradients over replicas: of a unit, or of buckets.

    Args:
        parameters: Returns those whose gradients it reduces, each as a module that holds it, and its name there.
        group: Process group of the replicas.
        replace: Takes a function in its place.
    """

    parameters: Callable[[], Sequence[Held]]
    group: Any
    replace: Callable[[AllReduce], None]


@dataclass(kw_only=True, eq=False)
class ReplicaReductions:
    """Stash of the all-reduces of data-parallel plugins: `context.stash(ReplicaReductions)`.

    Attributes:
        made: In the order in which they were made, alike on all replicas.
    """

    made: list[ReplicaReduction] = field(default_factory=list)
