"""Codecs on the wire, and the stash of the collectives that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Codec", "CodedCollectives", "CodedExchange"]


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
        """Return the elements, float32 RN."""

    def bound(self, x_RN: Tensor, /) -> Tensor:
        """Return the largest error that decoding may leave in each element, RN."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedExchange:
    """A collective with a codec on the wire, as `verify` tries it.

    Args:
        what: "gradients": every rank gives a row, N, to each of W ranks, and is given the sum of its rows. "weights":
            every rank gives a row and is given all.
        codec: Of rows.
        group: Process group of W ranks.
        run: Given this rank's rows, WN, returns their sum, N; or given its row, N, returns those of all ranks, WN.
        lengths: Values of N that were exchanged.
    """

    what: Literal["gradients", "weights"]
    codec: Codec
    group: Any
    run: Callable[[Tensor], Tensor]
    lengths: set[int] = field(default_factory=set)


@dataclass(kw_only=True, eq=False)
class CodedCollectives:
    """Stash of collectives that change numbers on purpose: `context.stash(CodedCollectives)`.

    Attributes:
        is_exact: Plugins are to send everything as it is: `verify` proves the run so, and every codec by itself.
        exchanges: By what travels and the name of the process group, once they have happened.
    """

    is_exact: bool = False
    exchanges: dict[tuple[str, str], CodedExchange] = field(default_factory=dict)
