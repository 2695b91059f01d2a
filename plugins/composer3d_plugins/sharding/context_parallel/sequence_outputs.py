"""Outputs of a model whose sequence is sharded: without padding, and whole for a loop that calls the model itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from composer3d.propagation import ShardSpec, gather_along
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
        """Return this rank's tokens, or all of them to a loop that calls the model itself.

        Collectives: in such a loop 1 all-gather, backward 1 reduce-scatter.
        """
        if spec is None or len(spec.placed.parts) > 1:
            return output
        dim, length = spec.placed.dim, spec.shadow.shape[spec.placed.dim]
        tokens = self.found.sequences.tokens(length)
        if self.found.sequences.is_own_forward:
            whole: Tensor = gather_along(output, dim, length, self.rules).narrow(dim, 0, tokens)
            return whole
        if tokens == length:
            return output
        return output.narrow(dim, 0, self.rules.positions(length).num_below(self.rules.group.rank, tokens))
