"""Torch's DeviceMesh of a layout, and views of it with other dims than its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.communication.group_options import GroupOptions, override_of, set_timeout_of
from composer3d.mesh.layout import BESIDE_EXPERTS, Layout, Role

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MeshViews", "build"]


def build(layout: Layout, *, device_type: str, options: Mapping[str, GroupOptions]) -> DeviceMesh:
    """Make the DeviceMesh of all dense axes; needs a process group of the layout's size.

    Collectives: what torch needs to make one process group an axis; axes of degree 1 without options share one of this
    rank alone.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from composer3d.torch_compat.collectives.processes import shared_lone_groups

    names = tuple(axis.name for axis in layout.dense_axes)
    override = {name: override_of(option) for name, option in options.items()}
    with shared_lone_groups():
        mesh = init_device_mesh(
            device_type,
            tuple(layout.degrees[name] for name in names),
            mesh_dim_names=names,
            backend_override={name: value for name, value in override.items() if value is not None} or None,
        )
    for name in names:
        set_timeout_of(mesh.get_group(name), options.get(name, GroupOptions()))
    return mesh


class MeshViews:
    """Views of the root mesh with other dims than its axes, each made once, so that DTensors of all plugins share it.

    A dim of several axes is named by those of degree above 1, joined by `+`. All ranks ask for the same views in the
    same order.

    Attributes:
        groups: Process groups that views have beside those of the axes, by the name of their dim.
        shards: Dims along which data-parallel plugins shard parameters without a mesh of their own.

    Args:
        root: Of all dense axes.
        layout: Its axes and degrees.
        options: Of the axes' process groups; a view has those of its outermost axis that has any.
    """

    def __init__(self, root: DeviceMesh, layout: Layout, options: Mapping[str, GroupOptions]) -> None:
        self._root, self._layout, self._options = root, layout, options
        self._made: dict[tuple[str, ...], DeviceMesh] = {}
        self._timed = {name for name, option in options.items() if option.timeout_s is not None}
        self.groups: dict[str, Any] = {}
        self.shards: list[DeviceMesh] = []
        self._experts = [self.carved(axis) for axis in layout.names(Role.EXPERT) if layout.degrees[axis] > 1]

    def joined(self, axes: Sequence[str]) -> DeviceMesh:
        """Return dense axes as one dim; without any above degree 1, this rank alone."""
        degrees = self._layout.degrees
        larger = tuple(axis.name for axis in self._layout.dense_axes if axis.name in axes and degrees[axis.name] > 1)
        if len(larger) > 1:
            return self._flattened(self._root[larger], larger)
        alone = (axis.name for axis in self._layout.dense_axes if degrees[axis.name] == 1)
        return self._root[larger[0] if larger else next(iter(axes), None) or next(alone)]

    def flattened(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return all dims of a view as one; dims of one rank are left out of its name."""
        names = mesh.mesh_dim_names or ()
        larger = tuple(name for dim, name in enumerate(names) if mesh.size(dim) > 1)
        if len(larger) > 1:
            return self._flattened(mesh[larger], larger)
        return mesh[larger or names[-1:]]

    def beside(self, *meshes: DeviceMesh) -> DeviceMesh:
        """Return one view with the dims of several."""
        from composer3d import torch_compat

        names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
        if ("beside", *names) not in self._made:
            self._made["beside", *names] = torch_compat.concatenate(meshes)
        return self._made["beside", *names]

    def data(self, own: DeviceMesh | None, *, replicas: str | None, shards: str | None) -> DeviceMesh:
        """Return the mesh of a data-parallel plugin; arguments as of `RunContext.data_mesh`.

        Args:
            own: The parameter's own mesh, if it has one.
            replicas: Axis of replicas.
            shards: Axis of shards.
        """
        if own is not None:
            return self._data_of(own, has_shards=shards is not None)
        for view in self._experts:  # on all ranks, those of stages without experts among them
            self._data_of(view, has_shards=shards is not None)
        outer = () if replicas is None else (replicas,)
        if shards is None:
            return self.joined((*outer, *(self._layout.names(Role.SEQUENCE) if outer else ())))
        inner = self.joined((shards, *self._layout.names(Role.SEQUENCE)))
        self.shards += [] if inner in self.shards else [inner]
        return self.beside(self.joined(outer), inner) if self._layout.degrees.get(replicas or "", 1) > 1 else inner

    def _data_of(self, own: DeviceMesh, *, has_shards: bool) -> DeviceMesh:
        experts = self._layout.names(Role.EXPERT)
        names = tuple(name for name in own.mesh_dim_names or () if name not in experts)
        if not has_shards:
            return self.flattened(own[names])
        shards, replicas = own[names[-1]], own[names]
        return shards if replicas.size() == shards.size() else self.beside(self.flattened(own[names[:-1]]), shards)

    def carved(self, axis: str) -> DeviceMesh:
        """Return the view in which an axis of role EXPERT is a dim: (dp_replicate, efsdp, axis).

        efsdp has the ranks of the axes that it is carved from with the same index along the axis.
        """
        from composer3d import torch_compat

        if ("carved", axis) not in self._made:
            axes = self._layout.carved_from(axis)
            whole, degree = self.joined(axes), self._layout.degrees[axis]
            dims = {BESIDE_EXPERTS: whole.size() // degree, axis: degree}
            override = {axis: override_of(self._options[axis])} if axis in self._options else {}
            carved = torch_compat.unflatten(whole, dims, own_group=axis, override=override)
            for name in dims:
                self._add(name, carved.get_group(name), (axis, *axes))
            self._made["carved", axis] = self.beside(self._root[self._layout.replicas], carved)
        return self._made["carved", axis]

    def untimed_groups(self) -> list[Any]:
        """Return the process groups of all axes and views, but for those whose options have a timeout."""
        found = {name: self._root.get_group(name) for name in self._root.mesh_dim_names or ()} | self.groups
        return [group for name, group in found.items() if name not in self._timed]

    def _flattened(self, mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
        from composer3d import torch_compat

        name = "+".join(names)
        if ("flattened", name) not in self._made:
            override = next((override_of(self._options[axis]) for axis in names if axis in self._options), None)
            self._made["flattened", name] = torch_compat.flatten(mesh, name, override=override)
            self._add(name, self._made["flattened", name].get_group(), names)
        return self._made["flattened", name]

    def _add(self, name: str, group: Any, axes: Sequence[str]) -> None:
        options = next((self._options[axis] for axis in axes if axis in self._options), GroupOptions())
        self.groups[name] = group
        self._timed |= {name} if options.timeout_s is not None else set()
        set_timeout_of(group, options)
