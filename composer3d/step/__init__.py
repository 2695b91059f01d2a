"""Optimizer step: engine, micro-batches, losses, gradients, guard and optimizer."""

from __future__ import annotations

from composer3d.observation.call_sites import caller
from composer3d.step.counted_buffers import counting_actions
from composer3d.step.evaluation import reshard_units
from composer3d.step.gradients import local
from composer3d.step.guard import Guard, Totals
from composer3d.step.loops.loop_state import Decided
from composer3d.step.losses.criterion import Criterion
from composer3d.step.losses.loss import (
    as_loss,
    count_provisionally,
    count_valid,
    loss_of_model,
)
from composer3d.step.losses.loss_graph import divisor_of_mean, divisors_of_terms, reduction_of
from composer3d.step.microbatches import Digest, map_tensors, split_batch, tensors, to_device, units_of
from composer3d.step.optimizers.optimizer_in_backward import exclusions
from composer3d.step.optimizers.optimizer_probe import refused_of_shards
from composer3d.step.optimizers.unit_steps import refused_in_units
from composer3d.step.random_numbers.draw_sites import Site
from composer3d.step.random_numbers.sample_draws import draw_of
from composer3d.step.sharded_tensors.full_tensors import full, gather_full

__all__ = [
    "Criterion",
    "Decided",
    "Digest",
    "Guard",
    "Site",
    "Totals",
    "as_loss",
    "caller",
    "count_provisionally",
    "count_valid",
    "counting_actions",
    "draw_of",
    "full",
    "gather_full",
    "exclusions",
    "reshard_units",
    "local",
    "loss_of_model",
    "map_tensors",
    "divisor_of_mean",
    "divisors_of_terms",
    "reduction_of",
    "refused_in_units",
    "refused_of_shards",
    "split_batch",
    "tensors",
    "to_device",
    "units_of",
]
