"""All-gathers of float8 weights: as bytes where the backend has no float8, with scales agreed on beforehand."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from composer3d import Units, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["ByteAllGather", "gather_as_bytes", "needs_bytes", "precompute_scales"]


class ByteAllGather:
    """FSDP2's all-gather with both sides viewed as bytes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gathered tensor."""
        import torch

        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather."""
        import torch

        return torch_compat.all_gather_single(
            output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group=group, async_op=async_op
        )


def needs_bytes(group: Any) -> bool:
    """Return whether a group's backend cannot carry float8: gloo knows no such type."""
    import torch.distributed as dist

    return dist.get_backend(group) == "gloo"


def gather_as_bytes(units: Units) -> None:
    """Replace the all-gather of every unit."""
    for unit in units.by_module.values():
        unit.set_all_gather(ByteAllGather())


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8 together, so that gathers need not.

    Collectives: one all-reduce a mesh and placement of such weights; usually one.
    """
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    float8: Any = torch_compat.import_torchao("torchao.float8")
    groups: dict[Any, list[nn.Module]] = defaultdict(list)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, DTensor) and hasattr(weight.to_local(), "fsdp_pre_all_gather"):
                groups[weight.device_mesh, weight.placements].append(module)
    for modules in groups.values():
        # torchao stacks the norms of all weights, which must be of one mesh.
        float8.precompute_float8_dynamic_scale_for_fsdp(nn.ModuleList(modules))
