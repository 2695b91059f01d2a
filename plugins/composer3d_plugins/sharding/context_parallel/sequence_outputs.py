"""Outputs of a model whose sequence is sharded: without padding, and gathered for a loop that calls the model itself.

Shapes: an output [B, local length, ...], sharded along `placed.dim`, becomes [B, local tokens, ...] or [B, S, ...],
with S tokens of the sequence without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from composer3d.propagation import PropagationError, ShardSpec, gather_parts
from composer3d_plugins.sharding.context_parallel.eligibility import Found
from composer3d_plugins.sharding.context_parallel.sequence_rules import EngineRules

__all__ = ["Outputs"]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Converts each output tensor of the model to the one that the loss takes.

    A loss of gathered outputs is computed on every rank, and counted as often as its tokens are.

    Args:
        rules: Rules that all-gather shards.
        found: Findings about the model and the current batch.
        is_whole: Returns whether a size is that of all positions, and of no shard.
    """

    rules: EngineRules
    found: Found
    is_whole: Callable[[int], bool]

    def __call__(self, output: Tensor, spec: ShardSpec | None) -> Tensor:
        """Return this rank's tokens if the sequence is the batch's, and all tokens of any other sequence.

        Targets are sharded like the batch; those of lengths that the model creates itself are not. A loop that calls
        the model itself always receives all tokens, and so does a loss that relates them.

        Raises:
            PropagationError: It has all positions, where every output of the dry run was a shard: targets are shards.

        Collectives: where all tokens are returned, or shards are reordered: 1 all-gather, backward 1 reduce-scatter.
        """
        if spec is None:
            if self._was_sharded() and output.ndim > 1 and any(map(self.is_whole, output.shape[:-1])):
                raise PropagationError(
                    f"the model returns {list(output.shape)}, all positions of its sequence, where the dry run found "
                    "shards: how many there were in between depends on values, as of repeat_interleave by a tensor; "
                    "choose positions by a mask that keeps their number"
                )
            return output
        placed, length = spec.placed, spec.shadow.shape[spec.placed.dim]
        sequences = self.found.sequences
        tokens = sequences.tokens(length)
        is_of_batch = length in sequences.lengths
        if sequences.gathers or not is_of_batch or len(placed.parts) > 1:
            whole: Tensor = gather_parts(output, placed, self.rules)
            if sequences.gathers or not is_of_batch:
                return whole.narrow(placed.dim, 0, tokens)
            output = whole.index_select(placed.dim, self.rules.index(length, whole.device))
        if tokens == length:
            return output
        return output.narrow(placed.dim, 0, self.rules.positions(length).num_below(self.rules.group.rank, tokens))

    def _was_sharded(self) -> bool:
        form = self.found.form
        return form is not None and bool(form.specs) and None not in form.specs
