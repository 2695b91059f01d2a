"""The search for a layout: every combination of degrees and choices, by the traced costs of a few.

No rule of thumb is built in: that tensor parallelism stays inside a node, or that a model that fits one device is best
replicated, is what the costs say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from composer3d.planning.costs.allocator import reserved_bytes
from composer3d.planning.formulas.layout_numbers import Compression, Recompute, Setup
from composer3d.planning.formulas.manifest_setup import Offered, choices_of, shards_experts, shards_sequences
from composer3d.planning.hardware.cluster import Hardware

__all__ = [
    "Candidate",
    "Choices",
    "Costs",
    "Found",
    "Keep",
    "divisors",
    "evaluate",
    "nearest_worlds",
    "search",
    "search_choices",
    "sequence_degrees",
]

Keep = Callable[[Setup], bool]
FITS, TIGHT = 0.92, 1.0  # of the device's memory; between them a run may fail on a longer batch or fragmentation
_KEPT = 24  # of the fastest layouts
_NEAR = 1.5  # times as slow as the fastest: others are not worth a plan
_SPLITS = 3  # of the ways to shard over whole nodes, from each end


class Costs(Protocol):
    """Costs of layouts of one model on one cluster; see `LayoutCosts`."""

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can divide."""

    def can(self, setup: Setup) -> bool:
        """Return whether the model can be sharded so."""

    def peak_bytes(self, setup: Setup) -> int:
        """Return the bytes allocated on the fullest rank."""

    def step_s(self, setup: Setup) -> float:
        """Return the seconds of a step."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of the search, beside degrees and micro-batches.

    Args:
        zero: ZeRO stages of sharded data parallelism.
        schedules: Of a pipeline, each with numbers of stages a rank.
        recompute: What the backward recomputes, the fastest first.
        offload: Whether optimizer state may go to the host where nothing else fits.
        tp: Whether `tp` may be more than 1.
        cp: Whether `cp` may be more than the manifest's.
        ep: Whether `ep` may be more than the manifest's, where the model has experts.
        compression: What data parallelism may send in fewer bits, as another run.
    """

    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("1F1B", (1,)),
        ("Interleaved1F1B", (2, 4)),
        ("ZBVZeroBubble", (2,)),
    )
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    offload: bool = True
    tp: bool = True
    cp: bool = False
    ep: bool = False
    compression: tuple[Compression, ...] = ()

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """Values by key, of those whose values are words."""
        return {
            "schedule": ["none", *(name for name, _ in self.schedules)],
            "recompute": self.recompute,
            "offload": ["false", *["true"] * self.offload],
            "precision": [],
            "compression": ["none", *self.compression],
        }


def search_choices(offers: Sequence[Offered]) -> Choices:
    """Return what the installed plugins let a search choose."""
    kept: tuple[Recompute, ...] = ("none", "selective", "full")
    recomputed = choices_of(offers, "recompute")
    return Choices(
        zero=tuple(sorted(stage for stage in choices_of(offers, "zero") if stage)),
        schedules=choices_of(offers, "schedule"),
        recompute=tuple(mode for mode in kept if mode == "none" or mode in recomputed),
        offload=True in choices_of(offers, "offloads_state"),
        tp=bool(choices_of(offers, "sequence_parallel")),
        cp=shards_sequences(offers),
        ep=shards_experts(offers),
        compression=choices_of(offers, "compression"),
    )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its cost.

    Args:
        setup: The layout.
        peak_bytes: Allocated on the worst rank.
        reserved_bytes: What the device shows.
        step_s: Of an optimizer step.
        time: Its parts, as `plan --json` has them; None before it was planned.
        is_planned: Whether bytes and time are those of a plan, and not of the search.
    """

    setup: Setup
    peak_bytes: int
    reserved_bytes: float
    step_s: float
    time: Mapping[str, Any] | None = None
    is_planned: bool = False

    def verdict(self, memory_bytes: float) -> str:
        """Return `fits`, `tight` or `does not fit`."""
        part = self.reserved_bytes / memory_bytes
        return "fits" if part <= FITS else "tight" if part <= TIGHT else "does not fit"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search.

    Args:
        best: The fastest that fit, and of those that are nearly as fast one of every tensor- and pipeline-parallel
            degree.
        num_tried: Layouts whose memory was computed.
        num_fitting: Of those the ones that fit.
        smallest: The one with the least memory: where nothing fits, what is closest to it.
        tight: As `best`, of those that nearly fill the device, where nothing leaves room.
    """

    best: tuple[Candidate, ...]
    num_tried: int
    num_fitting: int
    smallest: Candidate | None
    tight: tuple[Candidate, ...] = ()


def search(
    costs: Costs,
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

    Tensor-parallel degrees are tried from the least on, since each has to be traced; those above one that is slower
    than the one before are left out.

    Args:
        costs: Of the model's layouts.
        base: The run: sequence, global batch, precision and kernels stay as they are.
        hardware: The cluster.
        world_size: Ranks.
        memory_bytes: Of a device; None takes the described one's.
        keep: What the user wants kept; layouts for which it is false are left out.
        choices: What installed plugins can make; None is what the built-in ones can.
        correction: By what a layout's memory is multiplied: what plans of its kind have shown.
    """
    limit = memory_bytes or hardware.device.memory_bytes
    choices = choices or Choices()
    fitting: list[Candidate] = []
    tight: list[Candidate] = []
    smallest: Candidate | None = None
    num_tried, before = 0, math.inf
    families = _families(costs.num_blocks, base, hardware, world_size, choices)
    for _, of_degree in itertools.groupby(families, key=lambda family: family[0].tp):
        found: list[Candidate] = []
        for family in of_degree:
            tried = list(_tried(costs, family, hardware, limit, keep=keep, choices=choices, correction=correction))
            num_tried += len(tried)
            smallest = min(filter(None, (smallest, *tried)), key=lambda one: one.peak_bytes, default=None)
            found += [one for one in tried if one.verdict(limit) == "fits"]
            tight += [one for one in tried if one.verdict(limit) == "tight"]
        fitting += [replace(one, step_s=costs.step_s(one.setup)) for one in found]
        least = min((one.step_s for one in fitting[len(fitting) - len(found) :]), default=math.inf)
        if least > before:
            break
        before = least
    nearly = [] if fitting else [replace(one, step_s=costs.step_s(one.setup)) for one in tight]
    return Found(
        best=_best(fitting), num_tried=num_tried, num_fitting=len(fitting), smallest=smallest, tight=_best(nearly)
    )


def _best(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the fastest, and of those that are nearly as fast one of every tensor- and pipeline-parallel degree."""
    ordered = sorted(candidates, key=lambda candidate: candidate.step_s)
    near = [one for one in ordered if one.step_s <= _NEAR * ordered[0].step_s]
    firsts = {(one.setup.tp, one.setup.pp): one for one in reversed(near)}
    return (*near[:_KEPT], *(one for one in firsts.values() if one not in near[:_KEPT]))


def _tried(
    costs: Costs,
    family: Sequence[Setup],
    hardware: Hardware,
    limit: float,
    *,
    keep: Keep,
    choices: Choices,
    correction: Callable[[Setup], float],
) -> Iterator[Candidate]:
    """Yield layouts of growing micro-batches with their memory; of each only what computes least of those that fit."""
    for setup in family:
        wanted = [choice for choice in _memory_choices(setup, choices) if keep(choice)]
        if wanted and not costs.can(setup):
            return
        for choice in wanted:
            candidate = _sized(costs, choice, hardware, correction(choice))
            yield candidate
            if candidate.verdict(limit) == "fits":
                break  # what follows computes more and keeps less
        else:
            if wanted:  # what is not wanted says nothing of larger micro-batches
                return


def sequence_degrees(own: Setup, world_size: int, choices: Choices) -> Iterator[int]:
    """Yield the degrees of cp to search, until something fits or what is larger is slower: the manifest's first.

    Args:
        own: The given manifest in numbers.
        world_size: Ranks.
        choices: What installed plugins can make.
    """
    yield own.cp
    degree = 2 * own.cp
    while choices.cp and world_size % degree == 0 and own.seq_len % (2 * degree) == 0:
        yield degree
        degree *= 2


def _sized(costs: Costs, setup: Setup, hardware: Hardware, correction: float) -> Candidate:
    peak = costs.peak_bytes(setup)
    reserved = correction * reserved_bytes(peak, hardware.device)
    return Candidate(setup=setup, peak_bytes=peak, reserved_bytes=reserved, step_s=math.inf)


def evaluate(costs: Costs, setup: Setup, hardware: Hardware) -> Candidate:
    """Return a layout with its memory and its time, by the costs of the search.

    Args:
        costs: Of the model's layouts.
        setup: The layout.
        hardware: The cluster.
    """
    return replace(_sized(costs, setup, hardware, 1.0), step_s=costs.step_s(setup))


def nearest_worlds(
    num_blocks: int, base: Setup, hardware: Hardware, world_size: int, *, keep: Keep, choices: Choices
) -> list[int]:
    """Return the next smaller and the next larger world with a layout: its degrees divide batch and blocks.

    Those of tensor parallelism are left out: what divides by them is known of a trace alone.

    Args:
        num_blocks: Of the model.
        base: As for `search`.
        hardware: The cluster.
        world_size: Ranks, for which nothing was found.
        keep: What the user wants kept.
        choices: What installed plugins can make.
    """

    def has_layout(size: int) -> bool:
        families = itertools.takewhile(
            lambda family: family[0].tp == 1, _families(num_blocks, base, hardware, size, choices)
        )
        return any(
            keep(choice) for family in families for setup in family for choice in _memory_choices(setup, choices)
        )

    batch, most = divisors(base.global_batch), min(num_blocks, 2 * world_size)
    sizes = sorted({base.cp * pp * replicas for pp in range(1, most + 1) for replicas in batch})
    ways = (
        [size for size in reversed(sizes) if size < world_size],
        [size for size in sizes if world_size < size <= 2 * world_size],
    )
    return [size for size in (next(filter(has_layout, way), None) for way in ways) if size is not None]


def _families(
    num_blocks: int, base: Setup, hardware: Hardware, world_size: int, choices: Choices
) -> Iterator[list[Setup]]:
    """Yield layouts that differ in the micro-batch only, the smallest first: the order of the memory they need."""
    for degrees in _degrees(num_blocks, base, world_size):
        if (degrees.tp > 1 and not choices.tp) or (degrees.pp > 1 and not choices.schedules):
            continue
        for sharded in _sharded(degrees, hardware.devices_per_node, choices.zero):
            sizes = list(_microbatches(sharded))
            for schedule, stages in _schedules(num_blocks, sharded, choices):
                experts = math.gcd(sharded.ep, sharded.dp_shard * sharded.cp)
                alike = [replace(setup, ep=experts) for setup in sizes]
                scheduled = [replace(setup, schedule=schedule, stages_per_rank=stages) for setup in alike]
                family = [setup for setup in scheduled if _runs(setup)]
                if family:
                    yield family


def _memory_choices(setup: Setup, choices: Choices) -> list[Setup]:
    """Return what may be recomputed and offloaded, the fastest first."""
    return [
        replace(setup, recompute=recompute, offload=host)
        for host in ((False, True) if choices.offload else (False,))
        for recompute in choices.recompute
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def _degrees(num_blocks: int, base: Setup, world_size: int) -> Iterator[Setup]:
    if world_size % base.cp:
        return
    for tp in divisors(world_size // base.cp):
        ranks = world_size // base.cp // tp
        for pp in range(1, min(num_blocks, ranks) + 1):
            replicas, rest = divmod(ranks, pp)
            if rest == 0 and base.global_batch % replicas == 0:
                yield replace(base, tp=tp, pp=pp, dp_shard=replicas, dp_replicate=1, sequence_parallel=tp > 1)


def _microbatches(setup: Setup) -> Iterator[Setup]:
    share = setup.global_batch // setup.data_parallel
    for size in divisors(share):
        yield replace(setup, microbatch=size)


def _sharded(setup: Setup, per_node: int, stages: Sequence[int]) -> Iterator[Setup]:
    """Yield replicas, ZeRO stages, and shards over a node, a few nodes or all ranks."""
    replicas = setup.dp_shard
    if replicas == 1:
        yield replace(setup, zero=3)
        return
    yield replace(setup, zero=0, dp_shard=1, dp_replicate=replicas)
    whole_nodes = [
        d for d in divisors(replicas) if d > 1 and (d == replicas or d * setup.tp * setup.cp % per_node == 0)
    ]
    for shards in dict.fromkeys((*whole_nodes[:_SPLITS], *whole_nodes[-_SPLITS:])):
        for zero in stages:
            yield replace(setup, zero=zero, dp_shard=shards, dp_replicate=replicas // shards)


def _schedules(num_blocks: int, setup: Setup, choices: Choices) -> list[tuple[str, int]]:
    if setup.pp == 1:
        return [("1F1B", 1)]
    return [
        (schedule, number)
        for schedule, numbers in choices.schedules
        for number in numbers
        if num_blocks >= setup.pp * number
    ]


def _runs(setup: Setup) -> bool:
    """Return whether a schedule has enough micro-batches, in whole rounds where it interleaves stages."""
    whole = setup.stages_per_rank == 1 or setup.num_microbatches % setup.pp == 0
    return setup.pp == 1 or (setup.num_microbatches >= setup.pp and whole)
