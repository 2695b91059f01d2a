"""Values of other stages in a pipeline, as plugins that propagate the code which receives them need them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ReceivedValues"]


@dataclass(kw_only=True, eq=False)
class ReceivedValues:
    """Stash of functions of values of other stages: `context.stash(ReceivedValues)`.

    Code between blocks computes with what a block of another stage has returned, and a plugin that shards activations
    knows how that one is sharded.

    Attributes:
        by_module: By the module of a stage, a function of the FQN of the module that has returned a value, the index of
            that call among those of its module, the index of the tensor in what it returned, and the tensor; it returns
            the one that the code of this stage is given.
        sequence_shards: Ranks of a further axis over which what blocks return may be sharded along the sequence too.
    """

    by_module: dict[nn.Module, Callable[[str, int, int, Tensor], Tensor]] = field(default_factory=dict)
    sequence_shards: int = 1

    def given(self, stage: nn.Module, fqn: str, call: int, index: int, value: Tensor) -> Tensor:
        """Return what the code of a stage is given for a value of another one.

        Args:
            stage: Its module.
            fqn: Of the module that returned it.
            call: Index among the calls of that module in a forward.
            index: Of the tensor in what it returned.
            value: As it was received.
        """
        made = self.by_module.get(stage)
        return value if made is None else made(fqn, call, index, value)
