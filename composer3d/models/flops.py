"""FLOPs of a token of training, for the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from composer3d.models.llama import Attention

__all__ = ["num_flops_per_token"]


def num_flops_per_token(model: nn.Module, seq_len: int) -> int:
    """Return the floating-point operations of forward and backward for one token, without recomputation.

    6 for every parameter that multiplies (2 forward, 4 backward), and 12 x width x seq_len for every attention layer:
    queries with keys and scores with values, all of them, although causal kernels skip half. This is the convention in
    which MFU figures are published. Embeddings count only where they are the output projection too.
    Source: Aakanksha Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, arXiv:2204.02311, 2022,
    appendix B.

    Args:
        model: The whole model; on meta will do. Attention is found in this package's models, in
            `nn.MultiheadAttention`, and by `config.num_hidden_layers` and `config.hidden_size` as Hugging Face models
            have them; that of any other model is left out.
        seq_len: Tokens that attend to each other.
    """
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    users = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    lookups -= {id(parameter) for module in users for parameter in module.parameters(recurse=False)}
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in lookups)
    return 6 * num_parameters + 12 * seq_len * sum(_attention_widths(model))


def _attention_widths(model: nn.Module) -> Iterator[int]:
    """Yield heads x head dim of every attention layer."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "num_hidden_layers") and hasattr(config, "hidden_size"):
        yield config.num_hidden_layers * config.hidden_size
        return
    for module in model.modules():
        if isinstance(module, Attention):
            yield module.wq.out_features
        elif isinstance(module, nn.MultiheadAttention):
            yield module.embed_dim
