"""Described clusters: the files in this folder, what must stand in them, and how one is measured."""

from __future__ import annotations

from composer3d.planning.hardware.cluster import Device, Gemm, Hardware, Link, hardware_names, load_hardware

__all__ = ["Device", "Gemm", "Hardware", "Link", "hardware_names", "load_hardware"]
