"""Linear layers with an exchange of the sequence before or after them, and the stash in which they are found.

Shapes: B batch, S sequence, T ranks of the group, L = S / T; D features outside, F this rank's features inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatheredLinear", "SequenceProjection", "SequenceProjections", "SummedLinear"]

# Takes x_BLD, weight_FD, bias_F or None, the sequence's dim and the process group; returns y_BSF and the gathered
# x_BSD. The gradient of each is this rank's part of a sum over ranks, which the gradient of x_BLD is.
GatheredLinear = Callable[["Tensor", "Tensor", "Tensor | None", int, Any], "tuple[Tensor, Tensor]"]
# Takes x_BSF, weight_DF, bias_D or None, the sequence's dim and the process group; returns the sum of all ranks'
# products, y_BLD, plus the bias.
SummedLinear = Callable[["Tensor", "Tensor", "Tensor | None", int, Any], "Tensor"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceProjection:
    """A linear layer whose input is all-gathered, or whose output is reduce-scattered, along the sequence.

    Args:
        fqn: Of the layer.
        kind: "gathered": of the layers that read one activation the first gathers it. "summed".
        group: Process group.
        replace: Takes a `GatheredLinear`, or a `SummedLinear`, which does both from then on.
    """

    fqn: str
    kind: Literal["gathered", "summed"]
    group: Any
    replace: Callable[[Any], None]


@dataclass(kw_only=True, eq=False)
class SequenceProjections:
    """Stash of the projections of sequence parallelism: `context.stash(SequenceProjections)`.

    A plugin that replaces them claims "sequence_projections"; without a claim they cannot be replaced.

    Attributes:
        planned: By FQN, the kind of what the plan of the whole model has, before parameters are sharded.
        made: Those of this rank's parts.
    """

    planned: dict[str, Literal["gathered", "summed"]] = field(default_factory=dict)
    made: list[SequenceProjection] = field(default_factory=list)
