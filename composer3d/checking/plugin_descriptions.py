"""Descriptions of installed plugins: family, axes, hooks, options with their types and defaults, refusals."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from composer3d.checking.stated_refusals import stated_refusals
from composer3d.errors import PluginError
from composer3d.hookspecs import HookSpecs
from composer3d.manifest import describe_keys, expected, fields, summary
from composer3d.registry import Catalogue, info_of
from composer3d.transform import Phase, StepPoint

__all__ = ["BESIDES", "PHASES", "describe_plugin"]

# Phases in which a hook's transforms may stand, where the hook itself does not name them.
PHASES = {
    "composer3d_split": ("SPLIT",),
    "composer3d_convert": ("CONVERT",),
    "composer3d_shard": ("TENSOR", "DATA"),
    "composer3d_reschedule": ("RECOMPUTE", "COMPILE"),
    "composer3d_collectives": ("COMMUNICATE",),
}
# Hooks that do not show what a plugin acts on.
BESIDES = ("composer3d_configure", "composer3d_close", "composer3d_layout")


def describe_plugin(catalogue: Catalogue, name: str, *, full: bool) -> dict[str, Any]:
    """Return the description of one plugin as JSON values; of one that cannot be imported, the reason as `error`.

    Args:
        catalogue: The installed plugins.
        name: One of them.
        full: With its source file, what each hook does, and its refusals.
    """
    entry: dict[str, Any] = {"name": name, "origin": catalogue.origin(name), "error": None}
    try:
        cls: Any = catalogue.load(name)
    except PluginError as error:
        return {**entry, "error": str(error)}
    info = info_of(cls)
    assert info is not None, "the catalogue checks it"
    hooks = [hook for hook in vars(HookSpecs) if hook.startswith("composer3d_") and hasattr(cls, hook)]
    phases = {
        phase
        for hook in hooks
        if hook in PHASES
        for phase in _named(getattr(cls, hook), "Phase", Phase.__members__) or PHASES[hook]
    }
    actions: Any = getattr(cls, "composer3d_step_actions", None)
    points = set() if actions is None else _named(actions, "StepPoint", StepPoint.__members__)
    return {
        **entry,
        "family": info.family,
        "owns": list(info.owns),
        "axes": [{"name": axis.name, "role": axis.role.value, "inside": axis.inside} for axis in info.axes],
        "phases": [phase.name for phase in Phase if phase.name in phases],
        "points": [point.name for point in StepPoint if point.name in points],
        "hooks": hooks,
        "devices": None if info.devices is None else list(info.devices),
        "extra": info.extra,
        "summary": summary(cls),
        "options": _options(cls),
        **(_details(cls, hooks) if full else {}),
    }


def _details(cls: Any, hooks: Collection[str]) -> dict[str, Any]:
    """Return what the long form has besides."""
    return {
        "file": inspect.getsourcefile(cls),
        "hook_docs": {hook: _sentence(inspect.getdoc(getattr(cls, hook)) or "") for hook in hooks},
        "refusals": [{"message": refusal.message, "hint": refusal.hint} for refusal in stated_refusals(cls)],
    }


def _sentence(text: str) -> str:
    """Return a docstring's first paragraph on one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _named(hook: Any, enum: str, members: Collection[str]) -> set[str]:
    """Return the members of an enum that a hook's own code names: what it returns exists only in a run."""
    names = set(hook.__code__.co_names)
    return names & set(members) if enum in names else set()


def _options(cls: type) -> list[dict[str, Any]]:
    """Return the keys of a plugin's table in the words that messages use."""
    from typing import Annotated

    from pydantic_core import to_jsonable_python

    descriptions = describe_keys(cls)
    result = []
    for key, field in fields(cls).items():
        annotation = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        option = {"key": key, "type": expected(annotation), "required": field.is_required()}
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            option["default"] = to_jsonable_python(default, serialize_unknown=True)
        result.append({**option, "description": descriptions.get(key, "")})
    return result
