"""Kinds of a module's weight, and the module whose code uses it."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["Kind", "kind_of", "reader_of"]

Kind = Literal["linear", "transposed", "embedding", "other"]


def kind_of(module: Any) -> Kind:
    """Return the kind of a module's weight: w_OI of a linear layer, w_IO of GPT-2's Conv1D, or rows to look up.

    A weight that is computed from other parameters, as parametrisations do, is none that can be sharded. The rows of a
    bag are reduced in the operator that looks them up, which takes the whole table.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return "other"
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim"):
        return "other" if hasattr(module, "include_last_offset") else "embedding"
    return "transposed" if hasattr(module, "nf") and weight.shape[1] == module.nf else "other"


def reader_of(model: Any, fqn: str) -> str:
    """Return the nearest module at or around one that has a forward: a ParameterList's parameters are used there."""
    from torch import nn

    while fqn:
        if type(model.get_submodule(fqn)).forward is not nn.Module.forward:
            return fqn
        fqn = fqn.rpartition(".")[0]
    return ""
