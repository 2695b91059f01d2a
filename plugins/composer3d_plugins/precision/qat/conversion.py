"""Export of quantised weights, in torchao's formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["described", "flattened", "quantised"]


def quantised(weight: Tensor, *, dtype: str, group_size: int, activations: str) -> Tensor:
    """Return a weight as torchao's tensor, whose products round like the trained layer's.

    Args:
        weight: weight_OI, `[out, in]`.
        dtype: Of the codes.
        group_size: Neighbours in a row that share a scale.
        activations: "int8": its products round every token, too.
    """
    from torch import nn

    torchao: Any = torch_compat.import_torchao("torchao.quantization")
    config = _config(dtype=dtype, group_size=group_size, activations=activations)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    torchao.quantize_(layer, config)
    return layer.weight.detach()


def _config(*, dtype: str, group_size: int, activations: str) -> Any:
    import torch

    torchao: Any = torch_compat.import_torchao("torchao.quantization")
    kind, group = getattr(torch, dtype), torchao.PerGroup(group_size)
    if activations == "int8":
        return torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=kind, weight_granularity=group)
    return torchao.IntxWeightOnlyConfig(kind, group)


def described(model: nn.Module, *, sources: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Return the `config.json` entry for `flattened` weights, for `from_pretrained` of transformers.

    Args:
        model: Whole.
        sources: See `flattened`, as the rest. A tied weight that is quantised under one of its names is tied no more.
        options: See there.
    """
    from torch import nn

    core: Any = torch_compat.import_torchao("torchao.core.config")
    linear = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantisation = {
        "quant_method": "torchao",
        "quant_type": {"default": core.config_to_dict(_config(**options))},
        "modules_to_not_convert": [fqn for fqn in linear if f"{fqn}.weight" not in sources],
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
    untied = {"tie_word_embeddings": False} if any(name != source for name, source in sources.items()) else {}
    return {"quantization_config": quantisation, **untied}


def flattened(
    tensors: Mapping[str, Tensor], *, sources: Mapping[str, str], dtype: str, group_size: int, activations: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a file's tensors, some quantised, and metadata, as torchao flattens them for safetensors.

    `torchao.prototype.safetensors.safetensors_support.unflatten_tensor_state_dict` restores them.

    Args:
        tensors: By name.
        sources: Names of quantised weights by exported name: another one where a weight is tied to an embedding.
        dtype: See `quantised`, as what follows.
        group_size: See there.
        activations: See there.
    """
    support: Any = torch_compat.import_torchao("torchao.prototype.safetensors.safetensors_support")
    options: dict[str, Any] = {"dtype": dtype, "group_size": group_size, "activations": activations}
    here = {name: tensors[source] for name, source in sources.items() if source in tensors}
    made = {**tensors, **{name: quantised(tensor, **options) for name, tensor in here.items()}}
    # torchao reads only tensors of modules, and ignores one that belongs to no module.
    own = {name: tensor for name, tensor in made.items() if "." in name}
    flat, metadata = support.flatten_tensor_state_dict(own)
    alone = {name: tensor for name, tensor in made.items() if name not in own}
    return {**flat, **alone}, metadata
