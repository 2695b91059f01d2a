"""Watches of the first forwards: numbers of samples, what relates samples, hooks on activations."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from composer3d.composition.loop.module_hooks import ModuleHooks
from composer3d.step.losses.inside_values import InsideValues
from composer3d.step.losses.mixed_values import MixedLosses
from composer3d.step.sample_counters import watch_sample_counters
from composer3d.transform import Phase

if TYPE_CHECKING:
    from composer3d.composition.preparing import Preparation
    from composer3d.context import RunContext
    from composer3d.step.engine import StepEngine
    from composer3d.step.losses.criterion import Criterion

__all__ = ["watch_functions", "watch_samples"]


def watch_samples(criterion: Criterion, context: RunContext) -> None:
    """Report what a model counts, and what a loss relates, of a rank's samples alone."""
    criterion.mixed, criterion.inside = MixedLosses(context), context.stash(InsideValues)
    modules = [module for part in context.parts for module in part.module.modules()]
    criterion.inside.are_hooked = ModuleHooks(modules)
    watch_sample_counters(context, criterion.given)


def watch_functions(engine: StepEngine, preparation: Preparation) -> None:
    """Let forwards be followed by what no graph shows: hooks on activations, and values that are detached.

    Compiled ones are left alone.
    """
    if any(transform.phase is Phase.COMPILE for transform, _ in preparation.selected):
        return
    context, criterion = preparation.context, engine.criterion
    told_by = functools.partial(criterion.mixed.report, loss_fn=criterion.given or "the model")
    for part in context.parts:
        engine.activations.watch(part.module)
        criterion.mixed.detached.watch(
            part.module,
            is_scheduled=lambda: engine.is_running,
            report=(lambda _: None) if criterion.told else told_by,
        )
