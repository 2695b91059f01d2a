"""Described clusters: the files in this folder, what must stand in them, and how one is measured."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.planning.hardware.calibration import Measurement, hardware_tables, mean_of, measure
    from composer3d.planning.hardware.cluster import Device, Gemm, Hardware, Link
    from composer3d.planning.hardware.hardware_file import hardware_names, load_hardware, problems_of

_MODULES = {
    "calibration": ("Measurement", "hardware_tables", "mean_of", "measure"),
    "cluster": ("Device", "Gemm", "Hardware", "Link"),
    "hardware_file": ("hardware_names", "load_hardware", "problems_of"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Device",
    "Gemm",
    "Hardware",
    "Link",
    "Measurement",
    "hardware_names",
    "hardware_tables",
    "load_hardware",
    "mean_of",
    "measure",
    "problems_of",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
