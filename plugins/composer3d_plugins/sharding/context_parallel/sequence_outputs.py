"""Outputs of a model whose sequence is sharded: without padding, and whole for a loop that calls the model itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer3d.propagation import ShardSpec, gather_parts
from composer3d_plugins.sharding.context_parallel.eligibility import Found
from composer3d_plugins.sharding.context_parallel.sequence_rules import EngineRules

__all__ = ["Outputs"]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Returns of each tensor that the model returns what the loss takes.

    A loss of whole outputs is computed on every rank, and counted as often as its tokens are.

    Args:
        rules: Exchanges.
        found: What is known of the model and of the batch at work.
    """

    rules: EngineRules
    found: Found

    def __call__(self, output: Tensor, spec: ShardSpec | None) -> Tensor:
        """Return this rank's tokens of a sequence that is the batch's, and all of another one.

        Targets are sharded as the batch is; those of lengths that the model makes itself are whole. All tokens are
        returned to a loop that calls the model itself, too.

        Collectives: where all are, or were sharded otherwise, 1 all-gather, backward 1 reduce-scatter.
        """
        if spec is None:
            return output
        placed, length = spec.placed, spec.shadow.shape[spec.placed.dim]
        sequences = self.found.sequences
        tokens = sequences.tokens(length)
        is_of_batch = length in sequences.lengths
        if sequences.is_own_forward or not is_of_batch or len(placed.parts) > 1:
            whole: Tensor = gather_parts(output, placed, self.rules)
            if sequences.is_own_forward or not is_of_batch:
                return whole.narrow(placed.dim, 0, tokens)
            output = whole.index_select(placed.dim, self.rules.index(length, whole.device))
        if tokens == length:
            return output
        return output.narrow(placed.dim, 0, self.rules.positions(length).num_below(self.rules.group.rank, tokens))
