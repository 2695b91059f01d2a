"""Trace of a manifest: of a job's kinds of rank, with what else a plan takes from the manifest and its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from composer3d import patterns, pieces_of, units_of
from composer3d.composition import find_blocks
from composer3d.mesh import Layout, Role
from composer3d.planning.formulas.manifest_setup import setup_of
from composer3d.planning.schedules.simulation import Costs, simulate
from composer3d.planning.traced_manifest import TracedManifest
from composer3d.planning.tracing.enough_microbatches import OrdersOf, ShortStep, short_step
from composer3d.planning.tracing.rank_roles import RankChoice, chosen_ranks
from composer3d.planning.tracing.rank_tracer import Tracer
from composer3d.planning.tracing.trace_cache import remembered, trace_key
from composer3d.registry import offering
from composer3d.step import tensors

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.planning.tracing.fake_composition import Job

__all__ = ["trace_manifest"]


def trace_manifest(
    job: Job,
    layout: Layout,
    *,
    orders_of: OrdersOf,
    schedule: str | None = None,
    choice: RankChoice = "worst",
    extrapolate: bool = True,
    notes: Sequence[str] = (),
) -> TracedManifest:
    """Trace the chosen ranks, or take their traces from disk.

    Args:
        job: A manifest with its model, batch, loss and optimizer.
        layout: Of its world.
        orders_of: Gives the pipeline's actions for a number of micro-batches, by rank along its axis; None without one.
        schedule: The name of the pipeline's schedule.
        choice: The ranks to trace; see `chosen_ranks`.
        extrapolate: Trace repeated blocks at two depths, where the rest follows from them.
        notes: As in `TracedManifest`.

    Raises:
        ComposerError: What cannot be composed, or a rank that there is not.
    """
    orders = orders_of(job.num_microbatches)
    simulation = None if orders is None else simulate(orders, Costs())

    def shortest(position: int, can_hold_fewer: bool) -> ShortStep:
        return short_step(orders_of, job.num_microbatches, position=position, can_hold_fewer=can_hold_fewer)

    tracer = Tracer(job, extrapolate=extrapolate, enough=shortest)
    chosen = chosen_ranks(layout, simulation, choice, tracer.contents() if choice == "worst" else ())
    traces = remembered(
        lambda: trace_key(tracer.job, chosen, extrapolate=extrapolate), lambda: tracer.trace_all(chosen)
    )
    unit, num_units = _units_of_step(job, layout)
    parameters = list(job.model.parameters())
    return TracedManifest(
        layout=replace(layout, degrees=dict(layout.degrees)),
        setup=setup_of(job.manifest, dict(layout.degrees), num_models=layout.degree(Role.INDEPENDENT, Role.REPLICA)),
        schedule=schedule,
        orders=None if orders is None else tuple(map(tuple, orders)),
        traces=tuple(traces),
        stack=tracer.stack,
        device=tracer.device,
        num_microbatches=job.num_microbatches,
        gpus_per_node=job.manifest.mesh.gpus_per_node,
        unit=unit,
        num_units=num_units,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameters_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_blocks=_num_blocks(job),
        offers=_offers(job.manifest),
        notes=tuple(notes),
    )


def _units_of_step(job: Job, layout: Layout) -> tuple[str, int]:
    """Return the unit of the model's inputs, and how many of it an optimizer step has."""
    unit, count = units_of(job.example)
    samples = next(tensor for tensor in tensors(job.example) if tensor.dim()).shape[0]
    most, total = 1, layout.degree(Role.BATCH, Role.INDEPENDENT)
    if job.preparation is not None:
        pieces = pieces_of(job.preparation.context)
        most, total = pieces.most, pieces.total
    return unit, count // samples * job.microbatch * job.num_microbatches // most * total * layout.num_groups


def _offers(manifest: Manifest) -> dict[str, str]:
    plugins = [(plugin.name, plugin.info) for plugin in manifest.plugins]
    choices = {
        (trait, value)
        for _, info in plugins
        if info.offer is not None
        for trait, values in info.offer.choices.items()
        for value in values
    }
    return {f"{trait}={value}": offering(plugins, trait, value) or "" for trait, value in sorted(choices, key=str)}


def _num_blocks(job: Job) -> int | None:
    blocks = job.manifest.model.blocks or find_blocks(job.model)
    names = [fqn for fqn, _ in job.model.named_modules()]
    return None if blocks is None else len(patterns.select(blocks, names))
