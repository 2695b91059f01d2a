"""`check`: everything that can be known of a manifest before a rank is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.checking.built_apart import build_apart
    from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
    from composer3d.checking.checked import CheckResult, check_for_any_model
    from composer3d.checking.first_forward import first_forward_problems
    from composer3d.checking.foreign_problems import apart, problem_of
    from composer3d.checking.plugin_descriptions import BESIDES, PHASES, describe_plugin
    from composer3d.checking.rules import find_factory
    from composer3d.checking.stated_worlds import world_size_problems
    from composer3d.checking.verbs import above_zero, as_set, verb, whole_number

_MODULES = {
    "built_apart": ("build_apart",),
    "check": ("Inspection", "collected_rarely", "device_of", "inspect", "open_manifest"),
    "checked": ("CheckResult", "check_for_any_model"),
    "first_forward": ("first_forward_problems",),
    "foreign_problems": ("apart", "problem_of"),
    "plugin_descriptions": ("BESIDES", "PHASES", "describe_plugin"),
    "rules": ("find_factory",),
    "stated_worlds": ("world_size_problems",),
    "verbs": ("above_zero", "as_set", "verb", "whole_number"),
}

__all__ = [
    "BESIDES",
    "CheckResult",
    "Inspection",
    "PHASES",
    "above_zero",
    "apart",
    "as_set",
    "build_apart",
    "check_for_any_model",
    "collected_rarely",
    "describe_plugin",
    "device_of",
    "find_factory",
    "first_forward_problems",
    "inspect",
    "open_manifest",
    "problem_of",
    "verb",
    "whole_number",
    "world_size_problems",
]

__getattr__ = late_imports(__name__, _MODULES)
