"""Sharding of what modules return, for stages of a pipeline that receive it: the code between blocks reads it too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation import PropagatedSequence, PropagationError, spec_of

__all__ = ["StageValues"]


class Shard(NamedTuple):
    """Sharding of a tensor that a module returned.

    Args:
        dim: Along which it is sharded.
        is_in_parts: Whether the dim has sequences one after the other, as rows of all samples are.
        is_of_batch: Whether the sequence is as long as an input.
    """

    dim: int
    is_in_parts: bool
    is_of_batch: bool


# Of each tensor that a call returns, in order; None where it is whole.
Returned = tuple[Shard | None, ...]


@dataclass(kw_only=True)
class StageValues:
    """Sharding of the tensors that the modules of a model returned in the dry run, for stages that receive them.

    A received shard carries no mark. Blocks mark what they take; the root's own code between blocks would take it for
    a whole sequence, and relate a rank's own positions alone.

    Args:
        axis: Over which the sequence is sharded.

    Attributes:
        lengths: Of the inputs of the dry run.
        returned: By FQN, of each call.
        sequence_shards: Returns over how many ranks of another axis shards may be sharded again.
    """

    axis: str
    lengths: tuple[int, ...] = ()
    returned: dict[str, list[Returned]] = field(default_factory=dict)
    sequence_shards: Callable[[], int] = lambda: 1

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what modules return inside, in a dry run; after hooks that are there already."""
        handles = [
            module.register_forward_hook(self._note(fqn), with_kwargs=True) for fqn, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, fqn: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch_compat.without_torch_functions():
                leaves = [leaf for leaf in torch_compat.tree_leaves(output) if isinstance(leaf, Tensor)]
                self.returned.setdefault(fqn, []).append(tuple(map(self._shard, leaves)))

        return note

    def _shard(self, leaf: Tensor) -> Shard | None:
        if (spec := spec_of(leaf, self.axis)) is None:
            return None
        parts = spec.placed.parts
        return Shard(spec.placed.dim, is_in_parts=len(parts) > 1, is_of_batch=sum(parts) in self.lengths)

    def complete(self, forms: Iterable[Sequence[str]]) -> None:
        """Let blocks that the dry run left out return what others of their form do."""
        for group in forms:
            known = [self.returned[fqn] for fqn in group if fqn in self.returned]
            self.returned |= {fqn: known[0] for fqn in group if known and fqn not in self.returned}

    def given(self, sequence: PropagatedSequence, fqn: str, call: int, index: int, value: Tensor) -> Tensor:
        """Return what the code of a stage is given for a value of another one: marked, if it is a shard.

        Args:
            sequence: Of the stage.
            fqn: Of the module that returned it.
            call: Index among its calls in a forward.
            index: Of the tensor in what it returned.
            value: As it was received.

        Raises:
            PropagationError: It is sharded in parts, or no shard of the batch's.
        """
        calls = self.returned.get(fqn, [])
        returned: Returned = calls[min(call, len(calls) - 1)] if calls else ()
        shard = returned[index] if index < len(returned) else None
        if shard is None or spec_of(value, self.axis) is not None:
            return value
        if shard.is_in_parts:
            raise PropagationError(
                f'"{fqn}" returns sequences one after the other in one dim, as rows without padding are, and a stage '
                "of the pipeline receives them; let blocks pass on samples and positions in dims of their own, or "
                "begin the stage elsewhere ([scheduling.pipeline] split)"
            )
        size = value.shape[shard.dim]
        if shard.is_of_batch and not {size, size * self.sequence_shards()}.intersection(sequence.local_sizes):
            raise PropagationError(
                f'"{fqn}" returns {size} positions, which is no shard of the batch, and a stage of '
                "the pipeline receives them: how many there are depends on values; choose and put them back in one "
                "stage"
            )
        return sequence.mark(value, shard.dim, is_inside=True)
