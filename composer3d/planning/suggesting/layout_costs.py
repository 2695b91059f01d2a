"""Memory and step time of any layout, from the traced costs of a few.

Tensor and context parallelism, precision and recomputation are traced; what data parallelism and a pipeline make of
them is closed form: states over their shards, micro-batches in flight, units gathered, collectives, the bubble. These
rank thousands of layouts in a second; what is proposed is planned.

Sources: Samyam Rajbhandari et al., ZeRO, arXiv:1910.02054; Deepak Narayanan et al., arXiv:2104.04473 (in flight).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from composer3d.errors import ComposerError
from composer3d.planning.costs.step_time import beside_compute
from composer3d.planning.formulas.collective_formulas import every_microbatch, once_a_step
from composer3d.planning.formulas.layout_numbers import Setup, in_flight, layers_of
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.suggesting.traced_costs import ActionTime, Moment, TracedCosts

__all__ = ["LayoutCosts"]

# What is left of 1F1B's bubble where the gradients of weights fill it.
_ZERO_BUBBLE = 0.2
_TWO_WAYS = ("ZBVZeroBubble", "DualPipeV")  # schedules whose first rank has the last stage


@dataclass(kw_only=True, eq=False)
class LayoutCosts:
    """Costs of layouts of one model, traced when they are first asked for.

    Args:
        trace: Traces a layout without data parallelism and without a pipeline; raises ComposerError for one that
            `check` refuses.
        hardware: The cluster.
        own: The given manifest in numbers: its micro-batch is traced.
        num_blocks: Equal blocks of the model, which a pipeline divides; 1 where it has no list of them.
        first_part: Of the parameters outside of blocks the part that comes before the blocks: embeddings.
        refused: Why layouts could not be traced.
    """

    trace: Callable[[Setup], TracedCosts]
    hardware: Hardware
    own: Setup
    num_blocks: int
    first_part: float = 0.5
    refused: list[str] = field(default_factory=list)
    _traced: dict[Setup, TracedCosts | None] = field(default_factory=dict)
    _modes: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _peaks: dict[Setup, int] = field(default_factory=dict)  # the search is repeated where a plan corrects it

    def can(self, setup: Setup) -> bool:
        """Return whether `check` accepts a layout's tensor-parallel degree, with what is traced of it."""
        base = self._base_of(setup)
        if any(found is None and base.tp % other.tp == 0 for other, found in self._plain(base)):
            return False  # what does not divide by 4 does not divide by 8
        return self._costs(base) is not None

    def peak_bytes(self, setup: Setup) -> int:
        """Return the bytes allocated at the worst moment on the fullest rank of a pipeline."""
        if setup not in self._peaks:
            self._peaks[setup] = int(max(self._stage(setup, rank).peak for rank in {0, setup.pp - 1}))
        return self._peaks[setup]

    def step_s(self, setup: Setup) -> float:
        """Return the seconds of a step: the slowest stage for every micro-batch, the ramp, and what follows."""
        stages = [self._stage(setup, rank) for rank in {0, setup.pp - 1}]
        ramp = (setup.pp - 1) / setup.stages_per_rank / setup.num_microbatches
        ramp *= _ZERO_BUBBLE if "Zero" in setup.schedule else 1
        return max(stage.busy_s for stage in stages) * (1 + ramp) + max(stage.after_s for stage in stages)

    def _stage(self, setup: Setup, rank: int) -> _Stage:
        layers = layers_of(self.num_blocks, setup)
        costs = self._costs(self._base_of(setup))
        assert costs is not None, "asked of a layout that can be"
        is_last = setup.pp == 1 or rank == setup.pp - 1 or setup.schedule in _TWO_WAYS
        kept, again = (1.0, 0.0) if setup.recompute == "none" else self._recomputed(setup)
        return _Stage(
            setup=setup,
            hardware=self.hardware,
            costs=costs,
            rank=rank,
            num_blocks=sum(layers[stage] for stage in range(setup.num_stages) if stage % setup.pp == rank),
            has_head=is_last,
            outer=1.0 if setup.pp == 1 else self.first_part if rank == 0 else 1 - self.first_part,
            kept=kept,
            again=again,
        )

    def _recomputed(self, setup: Setup) -> tuple[float, float]:
        """Return the part of a block's activations that is kept, and the part of its forward that is recomputed.

        Each mode is traced at the least tensor-parallel degree; at others, and at those of cp, the parts are about the
        same.
        """
        key = (setup.recompute, setup.precision)
        if key not in self._modes:
            known = self._plain(self._base_of(setup))
            least, plain = next((other, found) for other, found in known if found is not None)
            found = self._costs(replace(least, recompute=setup.recompute))
            kept, again = 1.0, 0.0
            if found is not None:
                kept = min(1.0, found.saved_bytes / max(plain.saved_bytes, 1.0))
                more = _block(found, "backward").kernels_s - _block(plain, "backward").kernels_s
                again = more / (_block(plain, "forward").kernels_s or 1.0)
            self._modes[key] = kept, max(0.0, again)
        return self._modes[key]

    def _plain(self, base: Setup) -> list[tuple[Setup, TracedCosts | None]]:
        """Return what was traced without recomputation in a layout's precision."""
        return [
            (other, found)
            for other, found in self._traced.items()
            if (other.recompute, other.precision, other.cp) == ("none", base.precision, base.cp)
        ]

    def _base_of(self, setup: Setup) -> Setup:
        """Return what is traced of a layout."""
        size = self.own.microbatch
        alone = replace(setup, dp_replicate=1, dp_shard=1, pp=1, ep=1, stages_per_rank=1, schedule="1F1B", zero=3)
        plain = replace(alone, recompute="none", offload=False, compression="none")
        return replace(plain, microbatch=size, global_batch=size)

    def _costs(self, base: Setup) -> TracedCosts | None:
        if base not in self._traced:
            try:
                self._traced[base] = self.trace(base)
            except ComposerError as error:
                self.refused.append(str(error))
                self._traced[base] = None
        return self._traced[base]


def _block(costs: TracedCosts, kind: str) -> ActionTime:
    """Return the time of one block."""
    return ActionTime.sum_of([(1, costs.time_of(kind, 1)), (-1, costs.time_of(kind, 0))])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stage:
    """All stages of one rank of a pipeline.

    Args:
        setup: The layout.
        hardware: The cluster.
        costs: Traced of its tensor-parallel degree.
        rank: Along the pipeline.
        num_blocks: Of its stages.
        has_head: Whether it has the last stage.
        outer: Its part of the parameters outside of blocks.
        kept: Part of a block's activations that is not recomputed.
        again: Part of a block's forward that the backward recomputes.
    """

    setup: Setup
    hardware: Hardware
    costs: TracedCosts
    rank: int
    num_blocks: int
    has_head: bool
    outer: float
    kept: float
    again: float

    # What no moment changes is computed once a stage: a search asks for thousands of peaks, each of many moments.
    @cached_property
    def scale(self) -> float:
        """A micro-batch over the one that was traced."""
        return self.setup.microbatch / self.costs.microbatch

    @cached_property
    def shards(self) -> int:
        """Ranks over which parameters, gradients and optimizer state are sharded."""
        return self.setup.dp_shard * self.setup.cp if self.setup.zero else 1

    def whole_bytes(self, name: str) -> float:
        """Return the bytes of parameters or states before sharding."""
        rest = self.costs.bytes_of(name, 0)
        return self.costs.bytes_of(name, self.num_blocks) - rest + self.outer * rest

    @cached_property
    def num_elements(self) -> float:
        """Parameters before data-parallel sharding."""
        return self.whole_bytes("parameters") / self.costs.parameter_size

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> float:
        """Bytes at the worst moment."""
        states = self.whole_bytes("parameters") / self.shards + self.costs.bytes_of("buffers", self.num_blocks)
        if not self.setup.offload:
            states += self.whole_bytes("optimizer") / self.shards
        moments = self.costs.moments(self.num_blocks)
        return states + max(self._alive(one) for one in moments if self.has_head or one.is_inside)

    def _alive(self, moment: Moment) -> float:
        """Return what a moment holds beside parameters and optimizer state."""
        gradients = moment.gradients if self._added_gradients is None else self._added_gradients
        if moment.kind == "optimizer":
            return (gradients + moment.transient) / self.shards
        block = self.costs.saved_bytes
        recomputed = (1 - self.kept) * min(moment.activations, self.num_blocks * block)
        activations = self._in_flight * (moment.activations - recomputed)
        activations += (1 - self.kept) * block if moment.kind == "backward" else 0.0
        gathered = min(moment.transient, self._units)
        working = moment.transient - gathered
        return gradients / self.shards + gathered + self._unsharded + self.scale * (activations + working)

    @cached_property
    def _added_gradients(self) -> float | None:
        """Bytes of gradients that several micro-batches add up, before sharding; None for one micro-batch."""
        return self.whole_bytes("gradients") if self.setup.num_microbatches > 1 else None

    @cached_property
    def _in_flight(self) -> float:
        """Micro-batches whose activations are held at most."""
        return in_flight(self.setup, self.rank)

    @cached_property
    def _units(self) -> float:
        """Bytes of two gathered units."""
        return 2 * self.num_elements / max(1, self.num_blocks) * self.setup.precision.gather_bytes

    @cached_property
    def _unsharded(self) -> float:
        """Parameters that stay whole besides the units at work, and gradients that micro-batches add up."""
        precision = self.setup.precision
        if not self.setup.zero:
            return self.num_elements * precision.compute_bytes if precision.param_bytes > precision.compute_bytes else 0
        if self.setup.zero < 3 or self.setup.pp > 1:  # torch's schedules reduce, and reshard, after the last backward
            return self.num_elements * (precision.compute_bytes + precision.reduce_bytes)
        return 0.0

    # ---- time --------------------------------------------------------------------------------------------------------

    @property
    def busy_s(self) -> float:
        """Seconds of all micro-batches."""
        setup, count = self.setup, self.setup.num_microbatches
        layers = max(1, self.num_blocks // setup.stages_per_rank)
        outer = self.outer * self.costs.bytes_of("parameters", 0) / self.costs.parameter_size
        num_elements = (self.num_elements - outer) / setup.stages_per_rank, outer / setup.stages_per_rank
        once = ((), ()) if setup.pp > 1 else once_a_step(setup, self.num_elements, self.num_blocks)
        again = (self.again * self.num_blocks, _block(self.costs, "forward"))
        total = 0.0
        for kind, special in zip(("forward", "backward"), once, strict=True):
            is_backward = kind == "backward"
            found = ActionTime.sum_of([(1, self._time(kind)), *([again] if is_backward else [])])
            computing = found.compute_s(self.hardware.device, scale=self.scale)
            sent = every_microbatch(setup, num_elements, layers, backward=is_backward) * setup.stages_per_rank
            each = beside_compute(sent, self.hardware, compute_s=computing).total_s
            first = beside_compute([*sent, *special], self.hardware, compute_s=computing).total_s
            total += (count - 1) * each + first + count * self.scale * found.waiting_s
        return total

    @property
    def after_s(self) -> float:
        """Seconds of what follows the last backward: reductions that nothing hides, and the optimizer."""
        setup, precision = self.setup, self.setup.precision
        gathers, reductions = once_a_step(setup, self.num_elements, self.num_blocks)
        late = (*gathers, *reductions) if setup.pp > 1 else ()
        waiting = [replace(transfer, is_overlapped=False) for transfer in late]
        found = self._time("optimizer")
        computing = max(found.kernels_s / self.shards, found.launches_s)
        if setup.offload:
            moved = 2 * self.num_elements / self.shards * (precision.state_bytes + precision.master_bytes)
            computing += moved / self.hardware.host.reached
        return beside_compute(waiting, self.hardware, compute_s=computing).total_s

    def _time(self, kind: str) -> ActionTime:
        """Return a kind's time; that of embedding and head, of which the head is most, is the last stage's."""
        whole = self.costs.time_of(kind, self.num_blocks)
        return whole if self.has_head else ActionTime.sum_of([(1, whole), (-1, self.costs.time_of(kind, 0))])
