"""Optimizers that a loop makes itself over the parameters of a composition."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from composer3d.composition.composed_model.changed_models import ComposedModules, refuse_added, refuse_unfrozen
from composer3d.errors import StepError

if TYPE_CHECKING:
    import torch

    from composer3d.context import RunContext
    from composer3d.step.engine import StepEngine

__all__ = ["refuse_other_optimizers"]


def refuse_other_optimizers(engine: StepEngine, context: RunContext, composed: ComposedModules) -> Callable[[], None]:
    """Raise before an optimizer that the composition did not make steps on its parameters inside a step.

    Its step would run on gradients that are not final, without the plugins' actions, and end no step. The composition's
    own optimizer is refused a model that has other parameters than it was composed with, or than it was made for.

    Args:
        engine: Runs the steps.
        context: Frozen.
        composed: The modules that were composed.

    Returns:
        What ends the watch.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if context.purpose != "run":
        return lambda: None
    watched, own = weakref.ref(engine), {id(parameter) for _, parameter in context.named_parameters()}
    checks: dict[int, Callable[[], None]] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine = watched()
        if engine is not None and optimizer is engine.optimizer:
            if id(optimizer) not in checks:
                refuse_added(context.parts, composed)
                # In the backward its groups hold the one parameter that is stepped; that others have gradients which
                # no hook saw is found at its end.
                steps_whole = engine.stepper is None
                checks[id(optimizer)] = refuse_unfrozen(context.parts, optimizer) if steps_whole else lambda: None
            checks[id(optimizer)]()
        if engine is None or engine.state is None or engine.is_stepping or engine.stepper is not None:
            return
        if optimizer is engine.optimizer or engine.is_plain:
            return
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            name = type(optimizer).__name__
            raise StepError(
                f"{name}.step() was called in step {engine.state.step} on parameters of the composition, which has not "
                f"made that optimizer: its gradients are not final, and no step ends; write optimizer = "
                f"run.optimizer(torch.optim.{name}, ...) instead of {name}(run.model.parameters(), ...)"
            )

    return register_optimizer_step_pre_hook(before).remove
