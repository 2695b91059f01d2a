"""Calls of the modules that shard the sequence and gather it, one after the other in every forward of the model.

A model that leaves blocks out (early exit, layers dropped in its own code) may leave out one of the two: blocks then
take a whole sequence for a shard of it, or the model's own code a shard for the whole, and nothing fails.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from composer3d import StepError, torch_compat
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rules

if TYPE_CHECKING:
    from torch import nn

__all__ = ["watch_boundaries"]


class _Boundaries:
    """Progress of a forward of the model.

    Args:
        split: FQN of the module that shards the sequence.
        gather: FQN of the module that gathers it.
    """

    def __init__(self, split: str, gather: str) -> None:
        self._split, self._gather = split, gather
        self._is_inside = self._is_sharded = False

    def begin(self, *_: Any) -> None:
        """Begin a forward of the model."""
        self._is_inside, self._is_sharded = not torch_compat.in_backward(), False

    def shard(self, *_: Any) -> None:
        """Note that the sequence is sharded."""
        self._is_sharded = True

    def passes(self, fqn: str, *_: Any) -> None:
        """Refuse a block that is called on a whole sequence."""
        if self._is_inside and not self._is_sharded and not torch_compat.in_backward():
            raise StepError(_text(f'"{fqn}" was called', self._split, "shards"))

    def gather(self, *_: Any) -> None:
        """Note that the sequence is whole."""
        if not torch_compat.in_backward():
            self._is_sharded = False

    def end(self, *_: Any) -> None:
        """Refuse a forward of the model that has left a sharded sequence to the model's own code."""
        if self._is_inside and self._is_sharded:
            raise StepError(_text("the forward of the model ended", self._gather, "gathers"))
        self._is_inside = False


def _text(event: str, fqn: str, does: str) -> str:
    return (
        f'{event}, and "{fqn}", which {does} the sequence, was not called in this forward; with sequence_parallel all '
        "forwards call the first and the last block: let a block that is left out return its input from inside of its "
        "own forward, or write sequence_parallel = false"
    )


def watch_boundaries(model: nn.Module, rules: Rules) -> None:
    """Refuse forwards in which a block of a list is called without the one that shards the sequence, or gathers it.

    Args:
        model: A part. Of a stage that has one of the two, forwards begin or end on a shard.
        rules: Of the whole model.
    """
    held = dict(model.named_modules())
    ends = {
        style: [fqn for fqn, rule in rules.items() if rule.style == style and fqn in held]
        for style in ("split", "gather")
    }
    if [len(fqns) for fqns in ends.values()] != [1, 1]:
        return
    (split,), (gather,) = ends.values()
    boundaries = _Boundaries(split, gather)
    model.register_forward_pre_hook(boundaries.begin)
    model.register_forward_hook(boundaries.end)
    held[split].register_forward_pre_hook(boundaries.shard, prepend=True)
    parent, _, first = split.rpartition(".")
    last = gather.rpartition(".")[2] if gather.rpartition(".")[0] == parent else ""
    for name in held[parent]._modules if first.isdigit() else ():
        if name.isdigit() and int(first) < int(name) and (not last.isdigit() or int(name) <= int(last)):
            fqn = f"{parent}.{name}"
            held[fqn].register_forward_pre_hook(functools.partial(boundaries.passes, fqn), prepend=True)
    held[gather].register_forward_hook(boundaries.gather)
