"""The ordered plan of a step: actions of plugins by their points, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from composer3d.errors import ComposerError, HookError, ReferenceFailure, describe_error
from composer3d.transform import StepAction, StepPoint, order

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest

__all__ = ["StepRow", "step_rows"]


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One line of the plan of a step.

    Args:
        point: Name of the step point; OPTIMIZER, or BACKWARD of an optimizer that steps in it, is the optimizer's own.
        name: Of the action, or the optimizer's class.
        plugin: The table of the plugin that declares or makes it, `[optimizer]` where no plugin does, the model.
        note: Why its actions are not known yet.
    """

    point: str
    name: str
    plugin: str
    note: str = ""

    def __str__(self) -> str:
        row = f"{self.point:<23} {self.name:<24} {self.plugin}"
        return f"{row} ({self.note})" if self.note else row


def step_rows(preparation: Preparation) -> list[StepRow]:
    """Return what happens in every optimizer step, in order, as the rank in view will declare it.

    Plugins are asked with the whole model, on meta, as the only part. One that needs more, the mesh for example,
    declares its actions when the run is composed: it stands last, with its reason.

    Args:
        preparation: Without problems.

    Raises:
        OrderError: Actions cannot be ordered.
        HookError: A plugin raised, and not for what is missing here.
    """
    from composer3d.composition import gradient_hooks
    from composer3d.interfaces import Part
    from composer3d.step import counting_actions

    context = preparation.context
    context.parts = (Part(module=preparation.model),)
    actions: list[StepAction] = []
    owners: dict[str, str] = {}
    later: list[StepRow] = []
    for registered, function in preparation.hooks.asked("composer3d_step_actions"):
        table = f"[{registered.info.family}.{registered.name}]"
        try:
            answer = function(context=context) or ()
        except ComposerError as error:  # what a plugin looks for may not be there yet
            if isinstance(error, HookError) and error.is_own and not isinstance(error.__cause__, AttributeError):
                raise
            why = describe_error(error.__cause__ or error) if isinstance(error, HookError) else error
            note = f"declared when the run is composed: {why}"
            later.append(StepRow(point="?", name=registered.name, plugin=table, note=note))
            continue
        for action in (answer,) if isinstance(answer, StepAction) else answer:
            actions.append(action)
            owners[action.name] = table
    if preparation.attachments.hooks:
        actions.append(gradient_hooks(preparation.attachments))
        owners["model.gradient_hooks"] = "the model"
    for action in counting_actions(preparation.model.modules(), context):
        actions.append(action)
        owners[action.name] = "the model"
    rows = [StepRow(point=a.point.name, name=a.name, plugin=owners[a.name]) for a in order(actions)]
    return [*_with_optimizer(rows, preparation), *later]


def _with_optimizer(rows: list[StepRow], preparation: Preparation) -> list[StepRow]:
    """Insert the optimizer where it steps: after BEFORE_OPTIMIZER, or in the backward."""
    optimizer = _optimizer(preparation.context.manifest, preparation)
    if optimizer is None:
        return rows
    last = StepPoint.BEFORE_MICROBATCH if optimizer.point == "BACKWARD" else StepPoint.BEFORE_OPTIMIZER
    before = [row for row in rows if StepPoint[row.point] <= last]
    return [*before, optimizer, *rows[len(before) :]]


def _optimizer(manifest: Manifest, preparation: Preparation) -> StepRow | None:
    from composer3d.runner import optimizer_class

    table = manifest.tables.get("optimizer")
    if table is None:
        return None
    try:
        cls, defaults = optimizer_class(table, manifest.document.folder)
    except (ComposerError, ReferenceFailure):
        return None  # a problem, which is reported instead of the plan
    row = StepRow(point="BACKWARD" if table.in_backward else "OPTIMIZER", name=cls.__name__, plugin="[optimizer]")
    group = {"params": [p for p in preparation.model.parameters() if p.requires_grad], **defaults}
    for registered, function in preparation.hooks.asked("composer3d_optimizer"):
        made = function(context=preparation.context, cls=cls, groups=[group])
        if made is not None:
            return replace(row, name=type(made).__name__, plugin=f"[{registered.info.family}.{registered.name}]")
    return row
