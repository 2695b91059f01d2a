"""Ties: several FQNs that are one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from composer3d.errors import TransformError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["named_tensors", "restore_ties", "ties"]


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, with all their names: a tied tensor comes once under each."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of FQNs that are one parameter or buffer, each in the order of the model.

    Only identity counts: two parameters that merely overlap in memory are two parameters.
    """
    groups: dict[int, list[str]] = {}
    for fqn, tensor in named_tensors(model):
        groups.setdefault(id(tensor), []).append(fqn)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def restore_ties(model: nn.Module, groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Make each group one tensor again, the first that `model` holds; return the FQNs that were no longer it.

    torch's `parallelize_module` and `to_empty` give every module a parameter of its own, which breaks ties silently.

    Args:
        model: The model, or one stage of it: names that it does not hold are left out.
        groups: What `ties` returned for the whole model.

    Raises:
        TransformError: The copies now differ in shape or placement, so that they cannot be one tensor.
    """
    tensors = dict(named_tensors(model))
    retied: list[str] = []
    for group in groups:
        present = [fqn for fqn in group if fqn in tensors]
        for fqn in present[1:]:
            first = tensors[present[0]]
            if tensors[fqn] is not first:
                _check_alike(present[0], first, fqn, tensors[fqn])
                owner, _, name = fqn.rpartition(".")
                setattr(model.get_submodule(owner), name, first)
                retied.append(fqn)
    return tuple(retied)


def _check_alike(first: str, one: Tensor, second: str, other: Tensor) -> None:
    if _layout(one) != _layout(other):
        raise TransformError(
            f'"{first}" and "{second}" are one tensor, but are now placed as {_layout(one)} and as {_layout(other)}; '
            "plan both alike"
        )


def _layout(tensor: Tensor) -> str:
    from torch.distributed.tensor import DTensor

    shape = f"shape {tuple(tensor.shape)}"
    if not isinstance(tensor, DTensor):
        return shape
    placements = ", ".join(map(str, tensor.placements))
    return f"{shape} with ({placements}) over {tensor.device_mesh.mesh_dim_names}"
