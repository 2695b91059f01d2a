"""The time of a traced plan on a described cluster, and what is wrong with its layout there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d.planning.costs.time_report import time_report
from composer3d.planning.costs.timing import Estimate, estimate
from composer3d.planning.costs.whole_run import Questions, reliability, training
from composer3d.planning.formulas.lint import lint
from composer3d.planning.hardware.scaled_hardware import scaled
from composer3d.planning.traced_manifest import TracedManifest
from composer3d.planning.tracing.traced import RankTrace
from composer3d.registry import Catalogue

if TYPE_CHECKING:
    from composer3d.planning.hardware.cluster import Hardware

__all__ = ["advice_on", "time_of"]

# A backward computes two products for each of its forward's.
_FORWARDS = 3
# For the sensitivity of a step: parts that are half as fast, and waits that are twice as long.
_LESS = {"flops": 0.5, "memory": 0.5, "links": 0.5, "network": 0.5, "latency": 2.0, "launch": 2.0}


def time_of(traced: TracedManifest, hardware: Hardware, *, asked: Questions) -> Mapping[str, Any]:
    """Return what the time model says of a step, ready for JSON.

    Utilisation counts the model's FLOPs as traced: three forwards, attention in full, without what is recomputed.

    Args:
        traced: The step.
        hardware: The cluster, as it is.
        asked: Of the run, and of another cluster.

    Raises:
        ComposerError: A part that there is not; failures so frequent that nothing would be kept.
    """
    traces, layout, unit, size = traced.traces, traced.layout, traced.unit, traced.num_units
    forward = sum(trace.stands_for * _flops(trace, "forward") for trace in traces)
    covered = sum(trace.stands_for for trace in traces) / layout.world_size
    estimated = partial(
        estimate,
        traces,
        world_size=layout.num_ranks,
        tokens=size,
        model_flops=_FORWARDS * forward / covered / size,
        convention="traced: three forwards, attention in full",
        dtype=_main_dtype(traces),
        orders=traced.orders,
    )
    cluster = scaled(hardware, asked.what_if)
    found = estimated(cluster)
    report = _report(
        found,
        asked,
        cluster,
        units=size,
        checkpoint_bytes=_checkpoint_bytes(traced),
        world_size=layout.num_ranks,
    )
    if found.mfu is not None and (causal := _causal_part(traces)) is not None:
        report["mfu_causal"] = found.mfu.scaled(causal).to_json()
    less = _LESS | {term.part: 0.5 for term in found.offloading}
    report["sensitivity"] = _sensitivity(cluster, less, found.step_s.value, lambda other: estimated(other).step_s.value)
    if asked.what_if:
        before = estimated(hardware).step_s
        changed = {"factors": dict(asked.what_if), "hardware": hardware.name}
        report["what_if"] = {**changed, "step_s": before.to_json(), "times": found.step_s.value / before.value}
    if unit != "tokens":
        report = {name.replace("tokens", unit): figure for name, figure in report.items()}
    return {"hardware": cluster.name, "unit": unit, unit: size, **report}


def _report(
    found: Estimate, asked: Questions, hardware: Hardware, *, units: int, checkpoint_bytes: int, world_size: int
) -> dict[str, Any]:
    """Return the time of a step, and what it makes of a whole run."""
    run = failures = None
    if asked.num_units is not None:
        power = hardware.device.power_w
        run = training(found.step_s, asked, units=units, world_size=world_size, power_w=power)
    if asked.failures is not None:
        failures = reliability(found.step_s, asked.failures, checkpoint_bytes=checkpoint_bytes, world_size=world_size)
        run = None if run is None else run.interrupted_by(failures.goodput)
    return time_report(found, run, failures)


def _sensitivity(
    hardware: Hardware, less: Mapping[str, float], step_s: float, step_of: Callable[[Hardware], float]
) -> list[dict[str, str | float]]:
    """Return how many times as long a step takes where one part is half as fast, or waits twice as long."""
    return [
        {"part": part, "factor": factor, "times": step_of(scaled(hardware, {part: factor})) / step_s}
        for part, factor in less.items()
    ]


def _checkpoint_bytes(traced: TracedManifest) -> int:
    """Return the bytes of the whole model with its optimizer's state and averages, each tensor once.

    Ranks hold parameters and their states in the same number of replicas, so their ratio is that of the whole.
    """
    whole = traced.parameters_bytes
    held = sum(trace.stands_for * trace.memory.parameters for trace in traced.traces)
    states = sum(trace.stands_for * (trace.memory.optimizer + trace.memory.averages) for trace in traced.traces)
    return round(whole * (1 + states / held)) if held else whole


def _causal_part(traces: Sequence[RankTrace]) -> float | None:
    """Return the part of a forward's FLOPs with attention counted by half, as a causal kernel executes it.

    None where no operator is known as attention, so that it cannot be told from other products.
    """
    whole = attention = 0.0
    for trace in traces:
        for segment in trace.segments:
            for call in segment.operators if segment.kind == "forward" else ():
                flops = trace.stands_for * segment.count * call.count * call.flops
                whole += flops
                attention += flops if "attention" in call.name else 0.0
    return 1 - attention / 2 / whole if attention else None


def advice_on(
    trace: RankTrace, traced: TracedManifest, hardware: Hardware, memory_bytes: int, *, total_bytes: int
) -> tuple[str, ...]:
    """Return the mistakes of the layout on the cluster.

    Args:
        trace: Of the fullest rank.
        traced: The step.
        hardware: The cluster.
        memory_bytes: Of a device.
        total_bytes: What the fullest rank needs of it.
    """

    def offered(trait: str, value: Any) -> str | None:
        return traced.offers.get(f"{trait}={value}") or Catalogue.installed().offering(trait, value)

    found = lint(
        trace,
        traced.setup,
        hardware,
        num_parameters=traced.num_parameters,
        num_layers=traced.num_blocks,
        total_bytes=total_bytes,
        offered=offered,
        world_size=traced.layout.world_size,
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
