"""The mistakes of layouts, each with its numbers and with what would mend it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer3d.planning.costs.collective_time import collective_s, group_of
from composer3d.planning.formulas.layout_numbers import Setup, layers_of, state_bytes
from composer3d.planning.formulas.variation import Variation
from composer3d.planning.hardware.cluster import Hardware
from composer3d.planning.schedules.orders import orders_of
from composer3d.planning.schedules.simulation import Costs, simulate
from composer3d.planning.tracing.traced import RankTrace

__all__ = ["Advice", "lint"]

GIB = 2**30
_BUBBLE = 0.2  # of a step; four micro-batches a stage stay below it
_IMBALANCE = 0.05
_NeedsOf = Callable[[Setup], float]  # bytes of a layout's fullest rank
_Offered = Callable[[str, Any], str | None]  # the table that a plugin makes a trait of a layout by
_TRAITS = {"offload": "offloads_state"}  # fields of a setup that are called otherwise in plugins' offers
_ROOM = 0.7  # of the memory: below it, what was saved may be spent


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A mistake.

    Args:
        rule: Its name, for filters.
        severity: `error` cannot run, `warning` runs and wastes.
        message: What is wrong, with numbers.
        fix: What to write instead.
    """

    rule: str
    severity: Literal["error", "warning"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}; {self.fix}"


def lint(
    trace: RankTrace,
    setup: Setup,
    hardware: Hardware,
    *,
    num_parameters: int,
    num_layers: int | None,
    total_bytes: float,
    offered: _Offered,
    world_size: int | None = None,
    memory_bytes: float | None = None,
) -> tuple[Advice, ...]:
    """Return what is wrong with a layout, what cannot run first.

    Args:
        trace: Of the layout's fullest rank.
        setup: The layout.
        hardware: The cluster.
        num_parameters: Of the model.
        num_layers: Its equal blocks; None where it has no list of them.
        total_bytes: What a device must have for the fullest rank.
        offered: Returns the table to write for a trait of a layout and its value; None where no plugin offers it.
        world_size: Ranks that there are; None takes what the degrees multiply to.
        memory_bytes: Of a device; None takes the described one's.
    """
    limit = memory_bytes or hardware.device.memory_bytes
    needs_of = Variation(trace=trace, own=setup, total_bytes=total_bytes).needs
    found = [
        *_world(setup, world_size or setup.world_size),
        *_batch(setup),
        *_memory(num_parameters, setup, needs_of, limit, offered),
        *_tensor_parallel(trace, setup, hardware),
        *_pipeline(num_layers, setup),
        *_resharding(trace, num_parameters, setup, hardware, needs_of, limit, offered),
        *_precision(setup, hardware),
        *_recompute(setup, needs_of, limit),
    ]
    return tuple(sorted(found, key=lambda advice: advice.severity != "error"))


def _world(setup: Setup, world_size: int) -> Iterator[Advice]:
    if setup.world_size == world_size:
        return
    inner = setup.tp * setup.pp * setup.cp
    product = f"pp {setup.pp} x cp {setup.cp} x tp {setup.tp} x data parallel {setup.data_parallel}"
    fix = f"{world_size} ranks leave {world_size // inner} for data parallelism"
    if world_size % inner:
        fix = f"{inner} ranks hold one copy, so take a multiple of {inner} ranks"
    yield Advice(
        rule="world",
        severity="error",
        message=f"{product} = {setup.world_size} ranks, not {world_size}",
        fix=fix,
    )


def _batch(setup: Setup) -> Iterator[Advice]:
    unit = setup.microbatch * setup.data_parallel
    rest = setup.global_batch % unit
    if rest:
        below = setup.global_batch - rest
        yield Advice(
            rule="batch",
            severity="error",
            message=f"global_batch {setup.global_batch} / (microbatch {setup.microbatch} x data parallel "
            f"{setup.data_parallel}) = {setup.global_batch / unit:g}, which is not whole",
            fix=f"global_batch = {below or unit} or {below + unit}",
        )


def _memory(num_parameters: int, setup: Setup, needs_of: _NeedsOf, limit: float, offered: _Offered) -> Iterator[Advice]:
    states = sum(state_bytes(num_parameters, 1, 0, setup.precision).values())
    each = states / num_parameters
    if states / setup.world_size > limit:
        needed = math.ceil(states / limit)
        yield Advice(
            rule="cannot fit",
            severity="error",
            message=f"{num_parameters / 1e9:.4g} B parameters x {each:g} bytes = {states / 1e9:.4g} GB of "
            f"weights, gradients and optimizer state; {setup.world_size} devices hold "
            f"{setup.world_size * limit / 1e9:.4g} GB, whatever the degrees",
            fix=f"take at least {needed} devices, a low-bit optimizer, or offload",
        )
        return
    needs = needs_of(setup)
    if needs > limit:
        yield Advice(
            rule="does not fit",
            severity="error",
            message=f"the worst rank needs {needs / GIB:.1f} GiB of {limit / GIB:.1f} GiB",
            fix=_what_would_fit(setup, needs_of, limit, offered),
        )


def _what_would_fit(setup: Setup, needs_of: _NeedsOf, limit: float, offered: _Offered) -> str:
    """Return the smallest offered change that fits, those whose need is known before those of which a bound is."""
    changes: list[dict[str, Any]] = [{"zero": zero} for zero in (1, 2, 3)]
    changes += [{"recompute": "full"}, {"zero": 3, "recompute": "full"}, {"offload": True}]
    sharded: dict[str, Any] = {} if setup.zero else {"dp_shard": setup.data_parallel, "dp_replicate": 1}
    for change in changes:
        if change.get("zero", 4) <= setup.zero or change.get("recompute") == setup.recompute:
            continue
        needs = needs_of(replace(setup, **change, **sharded))
        tables = [offered(_TRAITS.get(key, key), value) for key, value in change.items()] if needs <= limit else []
        if tables and None not in tables:
            bound = "at least" if "recompute" in change else "about"
            return (
                f"{' and '.join(map(str, tables))} needs {bound} {needs / GIB:.1f} GiB; composer3d plan says whether "
                "it does"
            )
    return "composer3d suggest searches for a layout that fits"


def _tensor_parallel(trace: RankTrace, setup: Setup, hardware: Hardware) -> Iterator[Advice]:
    per_node = hardware.devices_per_node
    if setup.tp <= per_node and per_node % setup.tp == 0:
        return
    calls, across, inside = 0, 0.0, 0.0
    for segment in trace.segments:
        for each in segment.transfers:
            if each.axis == "tp":
                number = each.count * segment.count
                calls += number
                across += number * collective_s(each.op, each.bytes, group_of(each.ranks, per_node), hardware)
                inside += number * collective_s(each.op, each.bytes, group_of(range(per_node), per_node), hardware)
    yield Advice(
        rule="tp across nodes",
        severity="warning",
        message=f"tp = {setup.tp} does not stay inside nodes of {per_node}: its {calls} collectives a step "
        f"take {across:.3g} s over {hardware.inter.name}, and {inside:.3g} s over {hardware.intra.name} with "
        f"tp = {per_node}",
        fix=f"tp = {per_node} at most, and pp or data parallelism for the rest",
    )


def _pipeline(num_layers: int | None, setup: Setup) -> Iterator[Advice]:
    if setup.pp == 1:
        return
    count = setup.num_microbatches
    if setup.stages_per_rank > 1 and count % setup.pp and "Zero" not in setup.schedule:
        yield Advice(
            rule="micro-batches",
            severity="error",
            message=f"{setup.schedule} needs whole rounds of {setup.pp} micro-batches, and there are {count}",
            fix=f"make them {math.ceil(count / setup.pp) * setup.pp}",
        )
        return
    if setup.schedule in ("1F1B", "GPipe", "Interleaved1F1B"):
        orders = orders_of(
            setup.schedule, degree=setup.pp, num_microbatches=count, stages_per_rank=setup.stages_per_rank
        )
        found = simulate(orders, Costs())
        if found.bubble_share > _BUBBLE:
            enough = math.ceil((setup.pp - 1) / setup.stages_per_rank * (1 - _BUBBLE) / _BUBBLE)
            yield Advice(
                rule="micro-batches",
                severity="warning",
                message=f"{count} micro-batches on {setup.pp} stages: idle {found.bubble_share:.1%} of the step "
                f"({found.bubble_relative:.1%} of the ideal step)",
                fix=f"at least {enough} micro-batches idle less than {_BUBBLE:.0%}: a larger global_batch, a smaller "
                "microbatch, or a schedule with several stages a rank",
            )
    if num_layers is None:
        return
    if setup.num_stages > num_layers:
        yield Advice(
            rule="divisibility",
            severity="error",
            message=f"{setup.num_stages} stages, but only {num_layers} layers",
            fix=f"pp x stages_per_rank is at most {num_layers}",
        )
        return
    layers = layers_of(num_layers, setup)
    lost = max(layers) * len(layers) / sum(layers) - 1
    if lost > _IMBALANCE:
        yield Advice(
            rule="imbalance",
            severity="warning",
            message=f"{num_layers} layers on {setup.num_stages} stages: the largest holds {max(layers)}, so the "
            f"others wait {lost:.0%}",
            fix="a number of stages that divides the layers",
        )


def _resharding(
    trace: RankTrace,
    num_parameters: int,
    setup: Setup,
    hardware: Hardware,
    needs_of: _NeedsOf,
    limit: float,
    offered: _Offered,
) -> Iterator[Advice]:
    count = setup.num_microbatches
    if setup.zero != 3 or count == 1 or setup.dp_shard * setup.cp == 1:
        return
    if not _reduces_each_time(trace, num_parameters / setup.pp / setup.tp * setup.precision.reduce_bytes, count):
        return
    needs = needs_of(replace(setup, zero=2))
    if needs > _ROOM * limit or (table := offered("zero", 2)) is None:
        return
    held = num_parameters / setup.pp / setup.tp * setup.precision.gather_bytes
    again = collective_s("all_gather", held, group_of(setup.ranks("dp_shard"), hardware.devices_per_node), hardware)
    yield Advice(
        rule="resharding",
        severity="warning",
        message=f"zero = 3 gathers {held / 1e9:.3g} GB and reduces them again in each of {count} micro-batches: "
        f"{(2 * count - 1) * again:.3g} s of all-gathers a step",
        fix=f"{table} gathers {count} times and reduces once, and needs about {needs / GIB:.1f} of "
        f"{limit / GIB:.1f} GiB",
    )


def _reduces_each_time(trace: RankTrace, gradient_bytes: float, num_microbatches: int) -> bool:
    """Return whether gradients are reduced in every micro-batch; those of a pipeline, or of one unit, are not."""
    reduced = sum(
        segment.count * each.count * each.bytes
        for segment in trace.segments
        for each in segment.transfers
        if each.op == "reduce_scatter" and "dp_shard" in (each.axis or "").split("+")
    )
    # Stages, and what experts have over other axes, are no equal parts of the model.
    return reduced > gradient_bytes * (1 + num_microbatches) / 2


def _precision(setup: Setup, hardware: Hardware) -> Iterator[Advice]:
    known = "float8" if setup.precision.dtype.startswith("float8") else setup.precision.dtype
    if known in hardware.device.peaks:
        return
    have = ", ".join(sorted(hardware.device.peaks))
    yield Advice(
        rule="precision",
        severity="error",
        message=f"{hardware.device.name} multiplies no {known}: it would be emulated, without gain",
        fix=f"it has {have}",
    )


def _recompute(setup: Setup, needs_of: _NeedsOf, limit: float) -> Iterator[Advice]:
    if setup.recompute == "none":
        return
    needs = needs_of(replace(setup, recompute="none"))
    if needs > _ROOM * limit:
        return
    extra = "a third" if setup.recompute == "full" else "up to a sixth"
    yield Advice(
        rule="recompute",
        severity="warning",
        message=f"recompute {setup.recompute} computes {extra} more than is needed",
        fix=f"without it the worst rank needs at most {needs / GIB:.1f} of {limit / GIB:.1f} GiB",
    )
