"""Described clusters: the files in this folder, what must stand in them, and how one is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes import late_imports

if TYPE_CHECKING:
    from composer3d.planning.hardware.cluster import Device, Gemm, Hardware, Link
    from composer3d.planning.hardware.hardware_file import hardware_names, load_hardware, problems_of
    from composer3d.planning.hardware.machine import measure_machine
    from composer3d.planning.hardware.scaled_hardware import parse_factors, scaled

_MODULES = {
    "cluster": ("Device", "Gemm", "Hardware", "Link"),
    "hardware_file": ("hardware_names", "load_hardware", "problems_of"),
    "machine": ("measure_machine",),
    "scaled_hardware": ("parse_factors", "scaled"),
}

__all__ = [
    "Device",
    "Gemm",
    "Hardware",
    "Link",
    "hardware_names",
    "load_hardware",
    "measure_machine",
    "parse_factors",
    "problems_of",
    "scaled",
]

__getattr__ = late_imports(__name__, _MODULES)
