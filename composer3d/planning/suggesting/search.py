"""The search for a layout: every combination of degrees and choices by the static level, the best by simulation.

No rule of thumb is built in: that tensor parallelism stays inside a node, or that a model that fits one device is best
copied, is what the costs say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from composer3d.interfaces import Action
from composer3d.planning.costs.step_time import segment_time
from composer3d.planning.costs.timing import Estimate, estimate
from composer3d.planning.formulas.decoder_dims import ModelShape
from composer3d.planning.formulas.flops_conventions import flops_per_token
from composer3d.planning.formulas.layout_numbers import Recompute, Setup
from composer3d.planning.formulas.manifest_setup import Offered, choices_of
from composer3d.planning.formulas.memory_formulas import reserved_bytes
from composer3d.planning.formulas.static import peak_bytes, static_traces
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.schedules.orders import orders_of

__all__ = ["Candidate", "Choices", "Found", "Keep", "evaluate", "own_orders", "search", "search_choices"]

Keep = Callable[[Setup], bool]
FITS, TIGHT = 0.92, 1.0  # of the device's memory; between them a run may fail on a longer batch or fragmentation
# What is left of 1F1B's bubble where the gradients of weights fill it; the simulation replaces it for the best.
_ZERO_BUBBLE = 0.2
_SIMULATED = 24
_SPLITS = 3  # of the ways to shard over whole nodes, from each end


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the search may choose, beside degrees and micro-batches.

    Args:
        zero: ZeRO stages of sharded data parallelism.
        schedules: Of a pipeline, each with numbers of stages a rank.
        recompute: What the backward recomputes, the fastest first.
        offload: Whether optimizer state may go to the host where nothing else fits.
        tensor_parallel: Whether `tp` may be more than 1.
    """

    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("1F1B", (1,)),
        ("Interleaved1F1B", (2, 4)),
        ("ZBVZeroBubble", (2,)),
    )
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    offload: bool = True
    tensor_parallel: bool = True


def search_choices(offers: Sequence[Offered]) -> Choices:
    """Return what the installed plugins let a search choose."""
    kept: tuple[Recompute, ...] = ("none", "selective", "full")
    recomputed = choices_of(offers, "recompute")
    return Choices(
        zero=tuple(sorted(stage for stage in choices_of(offers, "zero") if stage)),
        schedules=choices_of(offers, "schedule"),
        recompute=tuple(mode for mode in kept if mode == "none" or mode in recomputed),
        offload=True in choices_of(offers, "offloads_state"),
        tensor_parallel=bool(choices_of(offers, "sequence_parallel")),
    )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its cost.

    Args:
        setup: The layout.
        peak_bytes: Allocated on the worst rank.
        reserved_bytes: What the device shows.
        step_s: Of an optimizer step.
        time: The parts of it; None before it was simulated.
        is_planned: Whether the bytes are those of a plan, and not of formulas.
    """

    setup: Setup
    peak_bytes: int
    reserved_bytes: float
    step_s: float
    time: Estimate | None = None
    is_planned: bool = False

    def verdict(self, memory_bytes: float) -> str:
        """Return `fits`, `tight` or `does not fit`."""
        part = self.reserved_bytes / memory_bytes
        return "fits" if part <= FITS else "tight" if part <= TIGHT else "does not fit"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        best: By step time, the fastest first; they fit.
        num_tried: Layouts whose memory was computed.
        num_fitting: Of those the ones that fit.
        smallest: The one with the least memory: where nothing fits, what is closest to it.
    """

    best: tuple[Candidate, ...]
    num_tried: int
    num_fitting: int
    smallest: Candidate | None


def search(
    shape: ModelShape,
    base: Setup,
    hardware: Hardware,
    *,
    world_size: int,
    memory_bytes: float | None = None,
    keep: Keep = lambda setup: True,
    choices: Choices | None = None,
    correction: Callable[[Setup], float] = lambda setup: 1.0,
) -> Found:
    """Find the layouts with the least step time that fit.

    Args:
        shape: Of the model.
        base: The run: sequence, global batch, precision and kernels stay as they are.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device; None takes the described one's.
        keep: What the user wants kept; layouts for which it is false are left out.
        choices: What installed plugins can make; None is what the built-in ones can.
        correction: By what a layout's modelled memory is multiplied: what plans of its kind have shown.
    """
    limit = memory_bytes or hardware.device.memory_bytes
    choices = choices or Choices()
    fitting: list[Candidate] = []
    smallest: Candidate | None = None
    num_tried = 0
    for family in _families(shape, base, hardware, world_size, choices):
        for setup in family:
            wanted = [choice for choice in _memory_choices(setup, choices) if keep(choice)]
            fits = not wanted  # what is not wanted says nothing of larger micro-batches
            for choice in wanted:
                peak = peak_bytes(shape, choice)
                num_tried += 1
                reserved = correction(choice) * reserved_bytes(peak, hardware)
                found = Candidate(setup=choice, peak_bytes=peak, reserved_bytes=reserved, step_s=math.inf)
                if smallest is None or peak < smallest.peak_bytes:
                    smallest = found
                if found.verdict(limit) == "fits":
                    fitting.append(replace(found, step_s=_quick_s(shape, choice, hardware)))
                    fits = True
                    break  # what follows computes more and keeps less
            if not fits:
                break
    fitting.sort(key=lambda candidate: candidate.step_s)
    best = [
        replace(evaluate(shape, candidate.setup, hardware), reserved_bytes=candidate.reserved_bytes)
        for candidate in fitting[:_SIMULATED]
    ]
    best.sort(key=lambda candidate: candidate.step_s)
    return Found(best=tuple(best), num_tried=num_tried, num_fitting=len(fitting), smallest=smallest)


def evaluate(
    shape: ModelShape, setup: Setup, hardware: Hardware, *, orders: Sequence[Sequence[Action]] | None = None
) -> Candidate:
    """Return a layout with its memory and its time.

    Args:
        shape: Of the model.
        setup: The layout.
        hardware: The cluster.
        orders: Of the pipeline; None makes those of the common schedules, and of others a closed form of the bubble.
    """
    peak = peak_bytes(shape, setup)
    known = orders if orders is not None else own_orders(setup)
    time = None
    if setup.pp == 1 or known is not None:
        time = estimate(
            static_traces(shape, setup),
            hardware,
            world_size=setup.world_size,
            tokens=setup.global_batch * setup.seq_len,
            model_flops=flops_per_token(shape, setup.seq_len, "palm"),
            dtype=_peak_dtype(setup, hardware),
            orders=known,
        )
    return Candidate(
        setup=setup,
        peak_bytes=peak,
        reserved_bytes=reserved_bytes(peak, hardware),
        step_s=_quick_s(shape, setup, hardware) if time is None else time.step_s.value,
        time=time,
    )


def _peak_dtype(setup: Setup, hardware: Hardware) -> str:
    """Return the dtype to whose peak utilisation refers: published figures take bfloat16's, for float8 too."""
    dtype = setup.precision.dtype
    return dtype if dtype in hardware.device.peaks and not dtype.startswith("float8") else "bfloat16"


def own_orders(setup: Setup) -> tuple[tuple[Action, ...], ...] | None:
    """Return the order of a layout's pipeline; None without one, or for one that only its plugin knows."""
    if setup.pp == 1 or "Zero" in setup.schedule:
        return None
    return orders_of(
        setup.schedule,
        degree=setup.pp,
        num_microbatches=setup.num_microbatches,
        stages_per_rank=setup.stages_per_rank,
    )


def _families(
    shape: ModelShape, base: Setup, hardware: Hardware, world_size: int, choices: Choices
) -> Iterator[list[Setup]]:
    """Yield layouts that differ in the micro-batch only, the smallest first: the order of the memory they need."""
    for degrees in _degrees(shape, base, world_size):
        if (degrees.tp > 1 and not choices.tensor_parallel) or (degrees.pp > 1 and not choices.schedules):
            continue
        for sharded in _sharded(degrees, hardware.devices_per_node, choices.zero):
            sizes = list(_microbatches(sharded))
            for schedule, stages in _schedules(shape, sharded, choices):
                scheduled = [replace(setup, schedule=schedule, stages_per_rank=stages) for setup in sizes]
                yield [setup for setup in scheduled if _runs(setup)]


def _memory_choices(setup: Setup, choices: Choices) -> list[Setup]:
    """Return what may be recomputed and offloaded, the fastest first."""
    return [
        replace(setup, recompute=recompute, offload=host)
        for host in ((False, True) if choices.offload else (False,))
        for recompute in choices.recompute
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _degrees(shape: ModelShape, base: Setup, world_size: int) -> Iterator[Setup]:
    for tp in divisors(math.gcd(world_size // base.cp, shape.num_heads)):
        if shape.ffn % tp or (tp <= shape.num_kv_heads and shape.num_kv_heads % tp) or tp > shape.num_kv_heads:
            continue
        for pp in divisors(world_size // base.cp // tp):
            copies = world_size // base.cp // tp // pp
            if pp <= shape.num_layers and base.global_batch % copies == 0:
                yield replace(base, tp=tp, pp=pp, dp_shard=copies, dp_replicate=1, sequence_parallel=tp > 1)


def _microbatches(setup: Setup) -> Iterator[Setup]:
    share = setup.global_batch // setup.data_parallel
    for size in divisors(share):
        if size & (size - 1) == 0:
            yield replace(setup, microbatch=size)


def _sharded(setup: Setup, per_node: int, stages: Sequence[int]) -> Iterator[Setup]:
    """Yield copies, ZeRO stages, and shards over a node, a few nodes or all ranks."""
    copies = setup.dp_shard
    if copies == 1:
        yield replace(setup, zero=3)
        return
    yield replace(setup, zero=0, dp_shard=1, dp_replicate=copies)
    whole_nodes = [d for d in divisors(copies) if d > 1 and (d == copies or d * setup.tp * setup.cp % per_node == 0)]
    for shards in dict.fromkeys((*whole_nodes[:_SPLITS], *whole_nodes[-_SPLITS:])):
        for zero in stages:
            yield replace(setup, zero=zero, dp_shard=shards, dp_replicate=copies // shards)


def _schedules(shape: ModelShape, setup: Setup, choices: Choices) -> list[tuple[str, int]]:
    if setup.pp == 1:
        return [("1F1B", 1)]
    return [
        (schedule, number)
        for schedule, numbers in choices.schedules
        for number in numbers
        if shape.num_layers >= setup.pp * number
    ]


def _runs(setup: Setup) -> bool:
    """Return whether a schedule has enough micro-batches, in whole rounds where it interleaves stages."""
    whole = setup.stages_per_rank == 1 or setup.num_microbatches % setup.pp == 0
    return setup.pp == 1 or (setup.num_microbatches >= setup.pp and whole)


def _quick_s(shape: ModelShape, setup: Setup, hardware: Hardware) -> float:
    """Return the step time with a closed form of the bubble: the slowest stage for every micro-batch, and the ramp."""
    traces = static_traces(shape, setup)
    totals, after = [], 0.0
    for trace in traces:
        times = [(segment, segment_time(segment, hardware)) for segment in trace.segments]
        late = sum(time.total_s for segment, time in times if segment.kind in ("gradients", "optimizer"))
        after = max(after, late)
        totals.append(
            sum(time.total_s * segment.count for segment, time in times if segment.kind in ("forward", "backward"))
        )
    count = setup.num_microbatches
    ramp = (setup.pp - 1) / setup.stages_per_rank / count
    if "Zero" in setup.schedule:
        ramp *= _ZERO_BUBBLE
    return max(totals) * (1 + ramp) + after
