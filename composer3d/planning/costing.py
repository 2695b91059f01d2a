"""The time of a traced plan on a described cluster, and what is wrong with its layout there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import units_of
from composer3d.mesh import Role
from composer3d.planning.costs.time_report import time_report
from composer3d.planning.costs.timing import estimate, training
from composer3d.planning.tracing.traced import RankTrace
from composer3d.step import tensors

if TYPE_CHECKING:
    from composer3d.interfaces import Action
    from composer3d.mesh import Layout
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.tracing.fake_composition import Job

__all__ = ["Budget", "advice_on", "time_of"]

# A backward computes two products for each of its forward's.
_FORWARDS = 3


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a whole run has.

    Args:
        num_units: Tokens that it is to see, or samples where those are the unit; None leaves the run out.
        price: Of one device for an hour.
    """

    num_units: float | None = None
    price: float | None = None


def time_of(
    traces: Sequence[RankTrace],
    job: Job,
    layout: Layout,
    hardware: Hardware,
    *,
    orders: Sequence[Sequence[Action]] | None,
    budget: Budget,
) -> Mapping[str, Any]:
    """Return what the time model says of a step, ready for JSON.

    Utilisation counts the model's FLOPs as traced: three forwards, attention in full, without what is recomputed.

    Args:
        traces: One for every kind of rank.
        job: What was traced.
        layout: Of its world.
        hardware: The cluster.
        orders: Actions by rank along the pipeline; None without one.
        budget: Of the run.
    """
    unit, count = units_of(job.example)
    samples = next(tensor for tensor in tensors(job.example) if tensor.dim()).shape[0]
    size = count // samples * job.microbatch * job.num_microbatches * layout.degree(Role.BATCH, Role.REPLICA)
    forward = sum(trace.stands_for * _flops(trace, "forward") for trace in traces)
    covered = sum(trace.stands_for for trace in traces) / layout.world_size
    found = estimate(
        traces,
        hardware,
        world_size=layout.num_ranks,
        tokens=size,
        model_flops=_FORWARDS * forward / covered / size,
        convention="traced: three forwards, attention in full",
        dtype=_main_dtype(traces),
        orders=orders,
    )
    run = None
    if budget.num_units is not None:
        run = training(found, num_tokens=budget.num_units, tokens=size, world_size=layout.num_ranks, price=budget.price)
    report = time_report(found, run)
    if unit != "tokens":
        report = {name.replace("tokens", unit): figure for name, figure in report.items()}
    return {"hardware": hardware.name, "unit": unit, unit: size, **report}


def advice_on(
    trace: RankTrace, job: Job, layout: Layout, hardware: Hardware, memory_bytes: int, *, total_bytes: int
) -> tuple[str, ...]:
    """Return the mistakes of the layout on the cluster.

    Args:
        trace: Of the fullest rank.
        job: What was traced.
        layout: Of its world.
        hardware: The cluster.
        memory_bytes: Of a device.
        total_bytes: What the fullest rank needs of it.
    """
    from composer3d import patterns
    from composer3d.composition import find_blocks
    from composer3d.planning.formulas.lint import lint
    from composer3d.planning.formulas.manifest_setup import setup_of

    blocks = job.manifest.model.blocks or find_blocks(job.model)
    names = [fqn for fqn, _ in job.model.named_modules()]
    found = lint(
        trace,
        setup_of(job.manifest, dict(layout.degrees)),
        hardware,
        num_parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        num_layers=None if blocks is None else len(patterns.select(blocks, names)),
        total_bytes=total_bytes,
        world_size=layout.world_size,
        memory_bytes=memory_bytes,
    )
    return tuple(map(str, found))


def _flops(trace: RankTrace, *kinds: str) -> int:
    segments = [segment for segment in trace.segments if segment.kind in kinds]
    return sum(segment.count * each.count * each.flops for segment in segments for each in segment.operators)


def _main_dtype(traces: Sequence[RankTrace]) -> str:
    """Return the dtype of most FLOPs: the one to whose peak utilisation refers."""
    flops: dict[str, int] = {}
    for trace in traces:
        for segment in trace.segments:
            for each in segment.operators:
                flops[each.dtype] = flops.get(each.dtype, 0) + segment.count * each.count * each.flops
    return max(flops, key=lambda dtype: flops[dtype])
