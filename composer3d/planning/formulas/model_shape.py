"""A decoder's shape, read from its modules; nothing is called, so a model on meta will do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from composer3d.errors import ModelError
from composer3d.planning.formulas.decoder_dims import ModelShape

__all__ = ["shape_of"]

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead")
_HEAD_DIM = 128  # where a model does not say
_TOLERANCE = 0.02  # of the parameters; what formulas say of a model that has others is not about this model


def shape_of(model: nn.Module, blocks: str) -> ModelShape:
    """Read what decides a decoder's cost: layers, widths, heads, vocabulary.

    Args:
        model: The whole model.
        blocks: The pattern of its repeated blocks, such as `layers.*`.

    Raises:
        ModelError: It has no embedding, its blocks have no linear layers, or it has other parameters than a decoder of
            these dimensions: a mixture of experts, an encoder besides.
    """
    pattern = re.compile(re.escape(blocks).replace(r"\*", r"[^.]+"))
    held = [module for fqn, module in model.named_modules() if pattern.fullmatch(fqn)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not held or not tables:
        raise ModelError(
            "has no embedding or no repeated blocks, and the search knows decoders only",
            key="blocks",
            hint='name the repeated blocks, for example [model] blocks = "layers.*"',
        )
    table = max(tables, key=lambda module: module.num_embeddings)
    hidden = table.embedding_dim
    linears = [module for module in held[0].modules() if isinstance(module, nn.Linear)]
    wide = [max(module.in_features, module.out_features) for module in linears if hidden in _dims(module)]
    if not wide:
        raise ModelError(
            f"has blocks without linear layers of its width {hidden}, and the search knows decoders only", key="blocks"
        )
    last, attention = _ffn(linears, hidden)
    ffn = last.in_features
    heads, head_dim = _heads(model, held[0], attention, hidden)
    others = [module.num_embeddings for module in tables if module is not table and module.embedding_dim == hidden]
    shape = ModelShape(
        num_layers=len(held),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(attention, hidden, heads, head_dim),
        head_dim=head_dim,
        ffn=ffn,
        vocab_size=table.num_embeddings,
        gated=sum(module.out_features for module in linears if module not in attention and module is not last) > ffn,
        tied=_is_tied(model, table),
        positions=sum(others),
        biases=max(0, sum(p.numel() for p in held[0].parameters() if p.dim() == 1) - 2 * hidden),
    )
    _refuse_other(shape, sum(parameter.numel() for parameter in model.parameters()))
    return shape


def _refuse_other(shape: ModelShape, num_parameters: int) -> None:
    """Raise for a model that is not what the formulas take it for."""
    if abs(shape.num_parameters - num_parameters) > _TOLERANCE * num_parameters:
        raise ModelError(
            f"has {num_parameters:,} parameters, and a decoder of {shape.num_layers} layers of width {shape.hidden}, "
            f"{shape.num_heads} heads, a feed-forward part of {shape.ffn} and a vocabulary of {shape.vocab_size} has "
            f"{shape.num_parameters:,}: the formulas know dense decoders only",
            key="use",
            hint="composer3d plan traces any model, and says what a layout needs",
        )


def _dims(module: nn.Linear) -> tuple[int, int]:
    return module.in_features, module.out_features


def _ffn(linears: Sequence[nn.Linear], hidden: int) -> tuple[nn.Linear, list[nn.Linear]]:
    """Return the layer that ends the feed-forward part, the last one, and the layers of attention.

    The feed-forward part's other layers are as wide as what it takes, or twice as wide: gate and value in one.
    """
    last = next((module for module in reversed(linears) if module.out_features == hidden), linears[-1])
    own = ((hidden, last.in_features), (hidden, 2 * last.in_features))
    return last, [module for module in linears if module is not last and _dims(module) not in own]


def _heads(model: nn.Module, block: nn.Module, attention: Sequence[nn.Linear], hidden: int) -> tuple[int, int]:
    """Return the number of query heads and their width, as a module or a configuration names them."""
    width = next((module.in_features for module in reversed(attention) if module.out_features == hidden), hidden)
    for place in _places(model, block):
        for name in _HEADS:
            number = getattr(place, name, None)
            if isinstance(number, int) and number > 0 and width % number == 0:
                return number, width // number
        dim = getattr(place, "head_dim", None)
        if isinstance(dim, int) and dim > 0 and width % dim == 0:
            return width // dim, dim
    dim = math.gcd(width, _HEAD_DIM)
    return width // dim, dim


def _places(model: nn.Module, block: nn.Module) -> Iterator[Any]:
    for module in (*block.modules(), model):
        yield module
        config = getattr(module, "config", None)
        if config is not None:
            yield config


def _kv_heads(attention: Sequence[nn.Linear], hidden: int, heads: int, head_dim: int) -> int:
    """Return the number of key and value heads: of the narrowest projection, or of what a fused one has left."""
    outs = [module.out_features for module in attention if module.in_features == hidden]
    fused = [out - heads * head_dim for out in outs if out > heads * head_dim]
    if fused:
        return max(1, fused[0] // 2 // head_dim)
    return max(1, min(outs, default=hidden) // head_dim)


def _is_tied(model: nn.Module, table: nn.Embedding) -> bool:
    """Return whether the output projection is the embedding: the same tensor, or one of a head that there is not."""
    users = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if any(module.weight is table.weight for module in users):
        return True
    return not any(module.out_features == table.num_embeddings for module in users)
