"""`check`: everything that can be known of a manifest before a rank is started."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
    from composer3d.checking.checked import CheckResult
    from composer3d.checking.foreign_problems import problem_of
    from composer3d.checking.plugin_descriptions import BESIDES, PHASES, describe_plugin
    from composer3d.checking.rules import find_factory

_MODULES = {
    "check": ("Inspection", "collected_rarely", "device_of", "inspect", "open_manifest"),
    "checked": ("CheckResult",),
    "foreign_problems": ("problem_of",),
    "plugin_descriptions": ("BESIDES", "PHASES", "describe_plugin"),
    "rules": ("find_factory",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "BESIDES",
    "CheckResult",
    "Inspection",
    "PHASES",
    "collected_rarely",
    "describe_plugin",
    "device_of",
    "find_factory",
    "inspect",
    "open_manifest",
    "problem_of",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
