"""Axes and degrees: from the manifest's `[mesh]` to coordinates, and later to torch's DeviceMesh."""

from composer3d.mesh.device_mesh import MeshViews, build
from composer3d.mesh.layout import AXES, BESIDE_EXPERTS, Axis, Layout, Role, arrange, crossings, resolve

__all__ = ["AXES", "BESIDE_EXPERTS", "Axis", "Layout", "MeshViews", "Role", "arrange", "build", "crossings", "resolve"]
