"""The manifest run: ranks started and watched, data, optimizer and the training loop, on composer3d's public names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.runner.batch_size import BatchSize
    from composer3d.runner.blackbox import REPORT_REQUEST, accounts_folder
    from composer3d.runner.ema import EMA
    from composer3d.runner.failures import FailureReport
    from composer3d.runner.housekeeping import set_timeout
    from composer3d.runner.launcher import is_rank, launch_local
    from composer3d.runner.local_world import group_problems
    from composer3d.runner.lock import attempts_of
    from composer3d.runner.lr_schedule import LRSchedule, multiplier_of
    from composer3d.runner.merged_weights import MergedWeights
    from composer3d.runner.model_factory import ModelFactory
    from composer3d.runner.node_counts import world_sizes
    from composer3d.runner.optimizer_arguments import refused_arguments
    from composer3d.runner.optimizer_groups import (
        in_backward_problems,
        make_optimizer,
        optimizer_class,
        untrained_problem,
    )
    from composer3d.runner.outcome import Outcome
    from composer3d.runner.progress import LastSeen
    from composer3d.runner.quantised_weights import find_form
    from composer3d.runner.runner_tables import TABLES, ModelTable, TrainTable
    from composer3d.runner.tokenizer import with_tokenizer
    from composer3d.runner.trainer import output_folder, train
    from composer3d.runner.warnings_once import warning_once
    from composer3d.runner.weight_export import Exported, export_checkpoint

_MODULES = {
    "batch_size": ("BatchSize",),
    "blackbox": ("REPORT_REQUEST", "accounts_folder"),
    "ema": ("EMA",),
    "failures": ("FailureReport",),
    "housekeeping": ("set_timeout",),
    "launcher": ("launch_local", "is_rank"),
    "local_world": ("group_problems",),
    "lock": ("attempts_of",),
    "lr_schedule": ("LRSchedule", "multiplier_of"),
    "merged_weights": ("MergedWeights",),
    "model_factory": ("ModelFactory",),
    "optimizer_arguments": ("refused_arguments",),
    "optimizer_groups": ("in_backward_problems", "make_optimizer", "optimizer_class", "untrained_problem"),
    "progress": ("LastSeen",),
    "quantised_weights": ("find_form",),
    "runner_tables": ("ModelTable", "TABLES", "TrainTable"),
    "tokenizer": ("with_tokenizer",),
    "outcome": ("Outcome",),
    "trainer": ("output_folder", "train"),
    "warnings_once": ("warning_once",),
    "weight_export": ("Exported", "export_checkpoint"),
    "node_counts": ("world_sizes",),
}

__all__ = [
    "REPORT_REQUEST",
    "BatchSize",
    "EMA",
    "Exported",
    "FailureReport",
    "LRSchedule",
    "LastSeen",
    "MergedWeights",
    "ModelFactory",
    "ModelTable",
    "Outcome",
    "TABLES",
    "TrainTable",
    "accounts_folder",
    "attempts_of",
    "export_checkpoint",
    "find_form",
    "in_backward_problems",
    "group_problems",
    "launch_local",
    "make_optimizer",
    "multiplier_of",
    "optimizer_class",
    "output_folder",
    "refused_arguments",
    "set_timeout",
    "train",
    "is_rank",
    "untrained_problem",
    "warning_once",
    "with_tokenizer",
    "world_sizes",
]

__getattr__ = late_imports(__name__, _MODULES)
