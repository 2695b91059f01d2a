"""Memory of a layout that differs from a traced one in ZeRO stage, recomputation or offloading: bounds for advice.

What differs is added to what was traced, so that the traced layout itself is exact. What recomputation keeps depends on
the model's code and is not estimated: with it the bound is what is needed without any activations, and without it what
is needed with all that the forward makes. `plan` says what another layout needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from composer3d.planning.costs.timed import result_bytes
from composer3d.planning.formulas.layout_numbers import Setup, in_flight
from composer3d.planning.tracing.traced import RankTrace

__all__ = ["Variation"]

_SLACK = 1.1
_DIVIDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Memory of other layouts, from the trace of one.

    Args:
        trace: Of the fullest rank.
        own: Its layout.
        total_bytes: What a device must have for it.
    """

    trace: RankTrace
    own: Setup
    total_bytes: float

    def needs(self, other: Setup) -> float:
        """Return what a device must have for another layout of as many ranks of tp and pp."""
        memory = self.trace.memory
        added = self._activations(other) - self._activations(self.own)
        added += self._unsharded(other) - self._unsharded(self.own)
        for name, stage in _DIVIDED_FROM.items():
            size = getattr(memory, name)
            added += size * (_divisor(self.own, stage) / _divisor(other, stage) - 1)
        if other.offload and not self.own.offload:
            added -= memory.optimizer * _divisor(self.own, 1) / _divisor(other, 1)
        # The context and communicators are as large; an allocator reserves as much over the rest as in a large model.
        slack = min(self.total_bytes / memory.peak, _SLACK)
        return self.total_bytes + max(-memory.peak, added) * slack

    def _activations(self, setup: Setup) -> float:
        """Return the activations of a mode of recomputation: traced, at least none, or at most all that is made."""
        kept = self.trace.memory.activations
        if setup.recompute == self.own.recompute:
            return kept
        if setup.recompute != "none":
            return 0.0
        made = sum(
            result_bytes(call) * call.count
            for segment in self.trace.segments
            if segment.kind == "forward"
            for call in segment.operators
        )
        return max(kept, made * in_flight(self.own, self.trace.coordinates.get("pp", 0)))

    def _unsharded(self, setup: Setup) -> float:
        """Return parameters and gradients that are whole for a step: below stage 3, and in a pipeline."""
        precision = setup.precision
        if setup.zero == 3 and setup.pp == 1 or _divisor(setup, 1) == 1:
            return 0.0
        num_elements = self.trace.memory.parameters * _divisor(self.own, 3) / precision.param_bytes
        return num_elements * (precision.compute_bytes + precision.reduce_bytes)


def _divisor(setup: Setup, stage: int) -> int:
    """Return by what a state is divided that ZeRO divides from a stage on."""
    reached = 3 if setup.zero and setup.shards_weights else setup.zero
    return setup.dp_shard * setup.cp if reached >= stage else 1
