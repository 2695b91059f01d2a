"""Weights of modules: their kinds, the attention heads that they make, and their replacement by DTensors over tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer3d import Role, RunContext
from composer3d.propagation import Call, kind_of, on_meta

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = [
    "AttentionSizes",
    "attention_sizes",
    "shard_of_weight",
    "distribute",
    "first_names",
    "names_of_modules",
    "gives_features",
    "parent_of",
]

# What the attention modules of common code bases call these.
HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_key_value_head")
HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_kv")


def shard_of_weight(
    module: Any, along: Literal["inputs", "outputs"], parts: Sequence[int] | None, degree: int
) -> tuple[int, tuple[int, ...]]:
    """Return the dim along which a linear layer's weight is sharded, and the lengths of every rank's runs."""
    dim = int((along == "inputs") == (kind_of(module) == "linear"))
    return dim, tuple(size // degree for size in parts or (module.weight.shape[dim],))


def gives_features(module: Any) -> bool:
    """Return whether a linear layer gives one tensor of its features; a router that is one may give something else."""
    rows, columns = module.weight.shape
    inputs, outputs = (columns, rows) if kind_of(module) == "linear" else (rows, columns)
    import torch
    from torch import Tensor

    x = torch.empty(2, inputs, dtype=module.weight.dtype, device="meta")
    try:
        result = on_meta(module, Call(args=(x,), kwargs={}))
    except Exception:  # a layer of the model's own may raise anything
        return False
    return isinstance(result, Tensor) and result.shape == (2, outputs)


def first_names(model: nn.Module, context: RunContext) -> dict[str, str]:
    """Return the first FQN of the module that each FQN stands for: one module may have several.

    Of stages, one may hold it by its second name alone: there each name stands for itself.
    """
    if context.layout.degree(Role.STAGE) > 1:
        return {fqn: fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    return names_of_modules(model)


def names_of_modules(model: nn.Module) -> dict[str, str]:
    """Return the first FQN of the module that each FQN stands for, whichever stages hold it."""
    first = {id(module): fqn for fqn, module in model.named_modules()}
    return {fqn: first[id(module)] for fqn, module in model.named_modules(remove_duplicate=False)}


def parent_of(model: nn.Module, fqn: str) -> nn.Module:
    """Return the module that a module is a direct child of."""
    return model.get_submodule(fqn.rpartition(".")[0])


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of one attention module: heads, key-value heads, and the dim of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def attention_sizes(module: Any, contracting: Sequence[int]) -> AttentionSizes | None:
    """Read an attention module's sizes off its attributes, or its config's; None where it has none.

    Args:
        module: The parent of the projections.
        contracting: Input features of the contracting projections in it, of which one makes the width of all heads.
    """
    holders = _holders(module)

    def find(names: Sequence[str]) -> int | None:
        values = [getattr(holder, name, None) for holder in holders for name in names]
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_heads = find(HEADS)
    if num_heads is None:
        return None
    head_dim = find(HEAD_DIMS) or next((size // num_heads for size in contracting if size % num_heads == 0), None)
    if head_dim is None:
        return None
    return AttentionSizes(num_heads=num_heads, num_kv_heads=find(KV_HEADS) or num_heads, head_dim=head_dim)


def _holders(module: Any) -> list[Any]:
    holders = [module]
    if "att" in type(module).__name__.lower():
        holders += [getattr(module, name) for name in ("config", "cfg", "args") if hasattr(module, name)]
    return holders


def distribute(
    module: nn.Module,
    name: str,
    placement: Placement,
    *,
    mesh: DeviceMesh,
    fqn: str,
    context: RunContext,
) -> None:
    """Replace a parameter by a DTensor with this rank's shard; every rank narrows its own, on meta or not.

    Args:
        module: Its owner.
        name: Its name there.
        placement: `Shard(d)` or `Replicate()`.
        mesh: Of one dim, tp.
        fqn: In the whole model: packed weights are reordered as the plan has set in the context.
    """
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    parameter = getattr(module, name)
    if parameter is None or isinstance(parameter, DTensor):
        return
    with torch.no_grad():
        full: Tensor = context.in_stored_order(fqn, parameter.detach())
        piece = full
        if isinstance(placement, Shard):
            # A copy: a view would keep the whole tensor alive.
            piece = full.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone(
                memory_format=torch.contiguous_format
            )
        value = DTensor.from_local(
            piece, mesh, [placement], run_check=False, shape=full.shape, stride=full.contiguous().stride()
        )
    setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
