"""Placement of full tensors: every rank copies its own shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from composer3d.errors import InitialisationError
from composer3d.initialisation.disk_weights import Slab
from composer3d.initialisation.ties import named_tensors, restore_ties
from composer3d.torch_compat import allocate, shard_of, take_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

    from composer3d.initialisation.recipe import Recipe

__all__ = ["give_memory", "materialise", "place"]


def place(target: Tensor, full: Tensor | Slab) -> None:
    """Write a full tensor into a parameter or buffer, plain or a DTensor of any placements.

    Each rank copies its own shard of `full`; the values are those that `target.full_tensor()` gathers. Memory: none
    but the copy of the shard where device or dtype differ. Collectives: none.

    Args:
        target: Sharded evenly or not, over any number of mesh axes; FSDP2's strided shards included.
        full: The same on all ranks; another dtype is converted. Of a tensor on disk only the shard is read.

    Raises:
        InitialisationError: The shapes do not fit, or a placement is neither a shard nor a replica.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if tuple(target.shape) != tuple(full.shape):
        raise InitialisationError(
            f"a tensor of shape {tuple(full.shape)} cannot be placed into one of shape {tuple(target.shape)}"
        )
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(_read(full))
            return
        piece = _piece(target, full)
        if piece is not None and target.to_local().numel():
            target.to_local().copy_(_read(piece))


def _read(value: Tensor | Slab) -> Tensor:
    return value.read() if isinstance(value, Slab) else value


def _piece(target: DTensor, full: Tensor | Slab) -> Tensor | Slab | None:
    """Return this rank's part of `full`, None on a rank outside the mesh."""
    coordinate = target.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    shards: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(target.placements):
        shard = shard_of(placement)
        if shard is not None:
            shards.append((shard.split_factor, axis, shard.dim))
        elif not placement.is_replicate():
            raise InitialisationError(f"a full tensor cannot be placed as {placement}")
    # Tensors are sharded over the mesh axes from left to right; a strided shard comes after those to its right, which
    # have made `split_factor` pieces.
    for _, axis, dim in sorted(shards):
        pieces = full.chunk(target.device_mesh.size(axis), dim)
        # chunk makes fewer pieces where the dim is short: the last ranks hold nothing.
        index = coordinate[axis]
        full = pieces[index] if index < len(pieces) else full.narrow(dim, 0, 0)
    return full


def materialise(
    module: nn.Module,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device | str,
    fqns_of: Callable[[str], str] | None = None,
    load: Callable[[str, Tensor | Slab], Tensor | Slab] | None = None,
) -> tuple[str, ...]:
    """Give a module on meta its weights, one full tensor at a time.

    Ties are restored first, and a tied tensor is made once. What is on meta gets memory on `device`; what has values
    already is moved there and keeps them, unless the recipe makes it. Memory: the module's own tensors, and for one
    tensor at a time its full value and history on the CPU. Collectives: none.

    Args:
        module: The model, or a part of it, in its final placement.
        recipe: From recording the model's factory.
        seed: Of the run.
        device: Where the tensors go.
        fqns_of: Gives the FQN in the whole model for a name in `module`; by default they are the same.
        load: Called with every FQN and full tensor before it is sharded, a `Slab` where it is on disk; its result is
            placed.

    Returns:
        Names of tensors on meta that the recipe does not make (a transform added them): their floating-point values
        are NaN, and the transform that added them must fill them.
    """
    import torch

    fqn_of = fqns_of or (lambda name: name)
    names = {name: fqn_of(name) for name, _ in named_tensors(module)}
    unmade = {name for name, tensor in named_tensors(module) if tensor.is_meta and names[name] not in recipe}
    allocate(module, device)
    restore_ties(module, [[name for name in names if names[name] in group] for group in recipe.ties])

    def full(fqn: str) -> Tensor | Slab:
        tensor = recipe.value(fqn, seed=seed)
        return tensor if load is None else load(fqn, tensor)

    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if names[name] in recipe:
            place(tensor, full(names[name]))
        elif name in unmade:
            with torch.no_grad():
                tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)
    for prefix, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            path = fqn_of(f"{prefix}.{name}" if prefix else name)
            if isinstance(value, torch.Tensor) and value.is_meta and path in recipe.attributes:
                setattr(owner, name, _read(full(path)).to(device))
    for path, tensor in recipe.loose.items():
        if tensor.is_meta and not take_memory(tensor, _read(full(path)).to(device)):
            raise InitialisationError(
                f'"{path}" cannot be given its values, since a graph or a weak reference points at it; '
                "register it with register_buffer(name, tensor, persistent=False)"
            )
    return tuple(sorted(unmade))


def give_memory(module: nn.Module, recipe: Recipe | None, *, device: torch.device | str) -> None:
    """Allocate meta tensors on a device, uninitialised: parameters, buffers and the recipe's plain attributes.

    Args:
        module: The model, or a part of it, in its final placement.
        recipe: From recording the model's factory; None where the model came without.
        device: Where the tensors go.
    """
    import torch

    allocate(module, device)
    for prefix, owner in module.named_modules():
        for name, value in list(vars(owner).items()):
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(value, torch.Tensor) and value.is_meta and recipe is not None and path in recipe.attributes:
                setattr(owner, name, torch.empty_like(value, device=device))
    for tensor in recipe.loose.values() if recipe is not None else ():
        if tensor.is_meta:
            take_memory(tensor, torch.empty_like(tensor.detach(), device=device))
