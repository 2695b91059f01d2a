"""The manifest run: ranks started and watched, data, optimizer and the training loop, on composer3d's public names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.runner.housekeeping import set_timeout
    from composer3d.runner.launching.launcher import is_rank, launch_local
    from composer3d.runner.launching.lock import attempts_of
    from composer3d.runner.launching.node_counts import node_counts, world_sizes
    from composer3d.runner.launching.node_place import node_problems
    from composer3d.runner.local_checkpoints import states_folder
    from composer3d.runner.model_factory import ModelFactory
    from composer3d.runner.objective.batch_size import BatchSize
    from composer3d.runner.objective.lr_schedule import LRSchedule, multiplier_of
    from composer3d.runner.objective.lr_schedule_table import LRScheduleTable
    from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
    from composer3d.runner.objective.optimizer_arguments import refused_arguments
    from composer3d.runner.objective.optimizer_groups import (
        in_backward_problems,
        make_optimizer,
        optimizer_class,
        untrained_problem,
    )
    from composer3d.runner.reporting.blackbox import REPORT_REQUEST, accounts_folder
    from composer3d.runner.reporting.failures import FailureReport
    from composer3d.runner.reporting.outcome import Outcome
    from composer3d.runner.reporting.progress import LastSeen
    from composer3d.runner.reporting.warnings_once import warning_once
    from composer3d.runner.runner_tables import TABLES, BatchRampTable, ModelTable, TrainTable
    from composer3d.runner.tokenizer import with_tokenizer
    from composer3d.runner.trainer import output_folder, train
    from composer3d.runner.weights.ema import EMA
    from composer3d.runner.weights.merged_weights import MergedWeights
    from composer3d.runner.weights.quantised_weights import find_form
    from composer3d.runner.weights.weight_export import Exported, export_checkpoint

_MODULES = {
    "objective.batch_size": ("BatchSize",),
    "reporting.blackbox": ("REPORT_REQUEST", "accounts_folder"),
    "weights.ema": ("EMA",),
    "reporting.failures": ("FailureReport",),
    "housekeeping": ("set_timeout",),
    "launching.launcher": ("launch_local", "is_rank"),
    "launching.lock": ("attempts_of",),
    "objective.lr_schedule": ("LRSchedule", "multiplier_of"),
    "objective.lr_schedule_table": ("LRScheduleTable",),
    "objective.muon": ("Muon", "group_matrices", "matrices_of"),
    "weights.merged_weights": ("MergedWeights",),
    "local_checkpoints": ("states_folder",),
    "model_factory": ("ModelFactory",),
    "objective.optimizer_arguments": ("refused_arguments",),
    "objective.optimizer_groups": ("in_backward_problems", "make_optimizer", "optimizer_class", "untrained_problem"),
    "reporting.progress": ("LastSeen",),
    "weights.quantised_weights": ("find_form",),
    "runner_tables": ("BatchRampTable", "ModelTable", "TABLES", "TrainTable"),
    "tokenizer": ("with_tokenizer",),
    "reporting.outcome": ("Outcome",),
    "trainer": ("output_folder", "train"),
    "reporting.warnings_once": ("warning_once",),
    "weights.weight_export": ("Exported", "export_checkpoint"),
    "launching.node_counts": ("node_counts", "world_sizes"),
    "launching.node_place": ("node_problems",),
}

__all__ = [
    "REPORT_REQUEST",
    "BatchRampTable",
    "BatchSize",
    "EMA",
    "Exported",
    "FailureReport",
    "LRSchedule",
    "LRScheduleTable",
    "LastSeen",
    "MergedWeights",
    "ModelFactory",
    "ModelTable",
    "Muon",
    "Outcome",
    "TABLES",
    "TrainTable",
    "accounts_folder",
    "attempts_of",
    "export_checkpoint",
    "find_form",
    "group_matrices",
    "in_backward_problems",
    "launch_local",
    "make_optimizer",
    "matrices_of",
    "multiplier_of",
    "node_counts",
    "node_problems",
    "optimizer_class",
    "output_folder",
    "refused_arguments",
    "set_timeout",
    "states_folder",
    "train",
    "is_rank",
    "untrained_problem",
    "warning_once",
    "with_tokenizer",
    "world_sizes",
]

__getattr__ = late_imports(__name__, _MODULES)
