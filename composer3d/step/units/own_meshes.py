"""Modules whose parameters live on meshes of their own, which data-parallel plugins handle as units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.errors import TransformError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.context import RunContext

__all__ = ["own_meshes", "whole_in_own_meshes"]


def own_meshes(model: nn.Module, context: RunContext) -> dict[str, str]:
    """Return the modules that data-parallel plugins handle as units on a mesh of their own: experts.

    They are the outermost ones with a forward of which all parameters have one mesh by `composer3d_parameter_mesh`;
    where some of a module's own have, others of its own and of modules inside may have none, and are of no unit. Each
    comes with the name of one of its parameters, for `context.data_mesh` and
    `context.parameter_mesh`.

    Args:
        model: A part of the whole one, by whose FQNs the hook is asked.
        context: With its mesh.

    Raises:
        TransformError: Parameters of one module have different meshes.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    parameters = dict(model.named_parameters(remove_duplicate=False))
    meshes = {fqn: _mesh(context, fqn) for fqn in parameters}
    if not any(mesh is not None for mesh in meshes.values()):
        return {}
    found: dict[str, str] = {}
    for module_fqn, module in model.named_modules():
        prefix = f"{module_fqn}." if module_fqn else ""
        inside = [fqn for fqn in meshes if f"{fqn}.".startswith(prefix)]
        own = {prefix + name: meshes[prefix + name] for name, held in module._parameters.items() if held is not None}
        if any(mesh is not None for mesh in own.values()):
            # What is sharded beside what has a mesh of its own has one: where a plugin states none, it is not whole all
            # the same. Modules inside may be sharded over other axes.
            whole = [fqn for fqn in inside if fqn not in own or not isinstance(parameters[fqn], DTensor)]
            inside = [fqn for fqn in inside if meshes[fqn] is not None or fqn not in whole]
        alike = {meshes[fqn] for fqn in inside}
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # never called
        if len(alike) == 1 and None not in alike and not is_list and not _is_inside(module_fqn, found):
            found[module_fqn] = inside[0]
    reached = {id(parameters[fqn]) for fqn in meshes if _is_inside(fqn, found)}  # a tied one under one of its names
    lost = [fqn for fqn, mesh in meshes.items() if mesh is not None and id(parameters[fqn]) not in reached]
    if lost:
        raise TransformError(
            f'"{lost[0]}" has a mesh of its own, and other parameters of "{lost[0].rpartition(".")[0]}" have another: '
            "a unit is gathered and reduced over one mesh; make them modules of their own, each with its forward"
        )
    return found


def whole_in_own_meshes(model: nn.Module, context: RunContext) -> set[str]:
    """Return the names of parameters in modules of `own_meshes` that are of no unit: experts share a norm, say.

    Data-parallel plugins leave them whole, and average their gradients over all ranks that divide a batch.

    Args:
        model: As above.
        context: As above.
    """
    own = own_meshes(model, context)
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)] if own else []
    return {fqn for fqn in names if _is_inside(fqn, own) and _mesh(context, fqn) is None}


def _mesh(context: RunContext, fqn: str) -> DeviceMesh | None:
    answer = context.parameter_mesh(fqn)
    return None if answer is None else answer.mesh


def _is_inside(fqn: str, modules: dict[str, str]) -> bool:
    return any(not module or fqn.startswith(f"{module}.") for module in modules)
