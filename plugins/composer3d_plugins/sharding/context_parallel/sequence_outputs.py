"""Outputs of a model whose sequence is sharded: without padding, and gathered for a loop that calls the model itself.

Shapes: an output [B, local length, ...], sharded along `placed.dim`, becomes [B, local tokens, ...] or [B, S, ...],
with S tokens of the sequence without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer3d.propagation import ShardSpec, gather_parts
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
    """

    rules: EngineRules
    found: Found

    def __call__(self, output: Tensor, spec: ShardSpec | None) -> Tensor:
        """Return this rank's tokens if the sequence is the batch's, and all tokens of any other sequence.

        Targets are sharded like the batch; those of lengths that the model creates itself are not. A loop that calls
        the model itself always receives all tokens, and so does a loss that relates them.

        Collectives: where all tokens are returned, or shards are reordered: 1 all-gather, backward 1 reduce-scatter.
        """
        if spec is None:
            return self._of_whole(output)
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

    def _of_whole(self, output: Tensor) -> Tensor:
        """Return this rank's tokens of an output that every rank has whole where the dry run found a shard.

        So it is where a number of positions in between depends on values: rows without padding that are put back.
        """
        form, sequences = self.found.form, self.found.sequences
        if form is None or not form.specs or None in form.specs:
            return output
        for dim in dict.fromkeys(spec.placed.dim for spec in form.specs if spec is not None):
            if output.ndim <= dim or (length := output.shape[dim]) not in sequences.lengths:
                continue
            tokens = sequences.tokens(length)
            if sequences.gathers:
                return output.narrow(dim, 0, tokens)
            own = output.index_select(dim, self.rules.index(length, output.device))
            return own.narrow(dim, 0, self.rules.positions(length).num_below(self.rules.group.rank, tokens))
        return output
