"""The quantised weights that were trained for, in torchao's formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["flattened", "quantised"]


def quantised(weight: Tensor, *, dtype: str, group_size: int, activations: str) -> Tensor:
    """Return a weight as torchao's tensor, whose products round as those of the trained layer.

    Args:
        weight: `[out, in]`.
        dtype: Of its numbers.
        group_size: Neighbours in a row that share a scale.
        activations: "int8": its products round every token, too.
    """
    import torch
    from torch import nn

    torchao: Any = torch_compat.import_torchao("torchao.quantization")
    kind, group = getattr(torch, dtype), torchao.PerGroup(group_size)
    if activations == "int8":
        config = torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=kind, weight_granularity=group)
    else:
        config = torchao.IntxWeightOnlyConfig(kind, group)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(layer, config)
    return layer.weight.detach()


def flattened(
    tensors: Mapping[str, Tensor], *, sources: Mapping[str, str], dtype: str, group_size: int, activations: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors, some quantised, and metadata, as torchao takes them apart for safetensors.

    `torchao.prototype.safetensors.safetensors_support.unflatten_tensor_state_dict` puts them together again.

    Args:
        tensors: By name.
        sources: What is quantised, by the name that it gets: another one where a weight is tied to what is no product.
        dtype: See `quantised`, as what follows.
        group_size: See there.
        activations: See there.
    """
    support: Any = torch_compat.import_torchao("torchao.prototype.safetensors.safetensors_support")
    options: dict[str, Any] = {"dtype": dtype, "group_size": group_size, "activations": activations}
    here = {name: tensors[source] for name, source in sources.items() if source in tensors}
    made = {**tensors, **{name: quantised(tensor, **options) for name, tensor in here.items()}}
    # torchao knows only tensors of modules; one that belongs to no module is beside what it reads.
    own = {name: tensor for name, tensor in made.items() if "." in name}
    flat, metadata = support.flatten_tensor_state_dict(own)
    alone = {name: tensor for name, tensor in made.items() if name not in own}
    return {**flat, **alone}, metadata
