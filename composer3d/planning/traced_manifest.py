"""All that a plan takes from a manifest, its model and its plugins: what follows from it needs neither of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer3d.interfaces import Action
from composer3d.mesh import Layout
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.hardware.cluster import StackName
from composer3d.planning.tracing.traced import RankTrace

__all__ = ["TracedManifest"]


@dataclass(frozen=True, kw_only=True)
class TracedManifest:
    """A manifest's step on a world, without any hardware.

    Args:
        layout: Of its world.
        setup: The layout in numbers.
        schedule: The name of its pipeline's schedule; None without one.
        orders: Actions of a step by rank along the pipeline; None without one.
        traces: One for every kind of rank.
        stack: The software that runs the steps.
        device: Kind of device of the run: `cpu`, where collectives run over gloo, or an accelerator's.
        num_microbatches: Of a step, on every data-parallel rank.
        gpus_per_node: As in `[mesh]`; None where it does not say.
        unit: Of the model's inputs: tokens or samples.
        num_units: Of them in an optimizer step over the whole world.
        num_parameters: Of the model.
        parameters_bytes: Of the model, each once.
        num_blocks: Of the model's equal blocks; None where it has no list of them.
        offers: Tables of the manifest's own plugins, by the trait and the value that they offer: `zero=3`.
        notes: What a reader has to know besides the notes of traces.
    """

    layout: Layout
    setup: Setup
    schedule: str | None
    orders: tuple[tuple[Action, ...], ...] | None
    traces: tuple[RankTrace, ...]
    stack: StackName
    device: str
    num_microbatches: int
    gpus_per_node: int | None
    unit: str
    num_units: int
    num_parameters: int
    parameters_bytes: int
    num_blocks: int | None
    offers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
