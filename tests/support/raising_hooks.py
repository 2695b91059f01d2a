"""Plugins of which one hook raises, one a hook, and plugins whose transform or step action does."""

from __future__ import annotations

import inspect
from typing import Any

from composer3d import Phase, StepAction, StepPoint, Transform, hookimpl, plugin
from composer3d.hookspecs import HookSpecs

__all__ = ["HOOKS", "InAction", "InApply", "InRows", "InSelect", "class_of"]

HOOKS = [name for name in vars(HookSpecs) if name.startswith("composer3d_")]


def class_of(hook: str) -> str:
    """Return the reference of the plugin whose hook of this name raises."""
    return f"support.raising_hooks:{hook}"


def _raising(hook: str) -> type:
    arguments = ", ".join(inspect.signature(getattr(HookSpecs, hook)).parameters)
    made: dict[str, Any] = {}
    code = compile(f"def {hook}({arguments}):\n    raise KeyError('in {hook}')\n", __file__, "exec")
    exec(code, made)
    return plugin(family="profiling")(type(hook, (), {hook: hookimpl(made[hook])}))


for _hook in HOOKS:
    globals()[_hook] = _raising(_hook)


def _fail(*unused: Any) -> Any:
    raise KeyError("in a function that a hook returned")


@plugin(family="profiling")
class InSelect:
    """A transform that cannot select."""

    @hookimpl
    def composer3d_convert(self, context: Any) -> Transform:
        return Transform(name="odd", phase=Phase.CONVERT, select=_fail, apply=_fail)


@plugin(family="profiling")
class InApply:
    """A transform that cannot be applied."""

    @hookimpl
    def composer3d_convert(self, context: Any) -> Transform:
        return Transform(name="odd", phase=Phase.CONVERT, select=lambda model, context: [""], apply=_fail)


@plugin(family="profiling")
class InRows:
    """A transform whose rows cannot be computed."""

    @hookimpl
    def composer3d_convert(self, context: Any) -> Transform:
        return Transform(
            name="odd", phase=Phase.CONVERT, select=lambda model, context: [""], apply=lambda *_: [""], rows=_fail
        )


@plugin(family="profiling")
class InAction:
    """A step action that raises."""

    @hookimpl
    def composer3d_step_actions(self, context: Any) -> StepAction:
        return StepAction(name="odd", point=StepPoint.BEGIN, run=_fail)
