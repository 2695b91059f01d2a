"""Names and shapes of Megatron-LM's tensors, and what stands for each in a Llama or mixture here or in transformers.

Sources: `megatron/core/models/gpt/gpt_layer_specs.py`, `transformer/attention.py` and `transformer/moe` of Megatron-LM
core 0.17.

Legend: N experts, D width of the model, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAMINGS", "Heads", "Naming", "naming_of", "taken_apart"]

_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention of the model that was saved.

    Args:
        num_heads: Query heads.
        num_groups: Key and value heads.
        pairs_are_neighbours: Whether rotary positions turn neighbouring elements; else those of two halves.
    """

    num_heads: int
    num_groups: int
    pairs_are_neighbours: bool


@dataclass(frozen=True, kw_only=True)
class Naming:
    """Names of a model's parameters.

    Args:
        whole: By Megatron-LM's name, of what is there once.
        layer: Beginning of the names of a layer, with a place for its number.
        parts: By Megatron-LM's name in a layer: one name, or those of the parts of a fused tensor.
        pairs_are_neighbours: Whether the model's rotary positions turn neighbouring elements.
        inputs_first: Whether an expert's weights have their inputs before their outputs.
        shared_is_several: Whether a shared expert is several times as wide as a routed one, a whole number of times.
    """

    whole: Mapping[str, str]
    layer: str
    parts: Mapping[str, tuple[str, ...]]
    pairs_are_neighbours: bool
    inputs_first: bool
    shared_is_several: bool

    def names(self, number: int, name: str) -> tuple[str, ...]:
        """Return the names of a layer's tensor; none where the model has no place for it."""
        return tuple(f"{self.layer.format(number)}{part}" for part in self.parts.get(name, ()))


_NORM_BEFORE_ATTENTION = ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
_NORM_BEFORE_MLP = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
_HF_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

NAMINGS: Mapping[str, Naming] = {
    "llama": Naming(
        whole={
            "embedding.word_embeddings.weight": "tok_embeddings.weight",
            "decoder.final_layernorm.weight": "norm.weight",
            "output_layer.weight": "output.weight",
        },
        layer="layers.{}.",
        parts={
            **dict.fromkeys(_NORM_BEFORE_ATTENTION, ("attention_norm.weight",)),
            "self_attention.linear_qkv.weight": ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"),
            "self_attention.linear_proj.weight": ("attention.wo.weight",),
            **dict.fromkeys(_NORM_BEFORE_MLP, ("ffn_norm.weight",)),
            "mlp.linear_fc1.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
            "mlp.linear_fc2.weight": ("feed_forward.w2.weight",),
            "mlp.router.weight": ("feed_forward.router.weight",),
            "mlp.router.expert_bias": ("feed_forward.router.bias_N",),
            f"{_EXPERTS}linear_fc1.weight": ("feed_forward.experts.w1_NDF", "feed_forward.experts.w3_NDF"),
            f"{_EXPERTS}linear_fc2.weight": ("feed_forward.experts.w2_NFD",),
            "mlp.shared_experts.linear_fc1.weight": ("feed_forward.shared.w1.weight", "feed_forward.shared.w3.weight"),
            "mlp.shared_experts.linear_fc2.weight": ("feed_forward.shared.w2.weight",),
        },
        pairs_are_neighbours=True,
        inputs_first=True,
        shared_is_several=True,
    ),
    "huggingface": Naming(
        whole={
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
        },
        layer="model.layers.{}.",
        parts={
            **dict.fromkeys(_NORM_BEFORE_ATTENTION, ("input_layernorm.weight",)),
            "self_attention.linear_qkv.weight": tuple(f"{each}.weight" for each in _HF_QKV),
            "self_attention.linear_qkv.bias": tuple(f"{each}.bias" for each in _HF_QKV),
            "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
            "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
            "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
            "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
            **dict.fromkeys(_NORM_BEFORE_MLP, ("post_attention_layernorm.weight",)),
            "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "mlp.linear_fc1.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
            "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
            "mlp.linear_fc2.bias": ("mlp.down_proj.bias",),
            "mlp.router.weight": ("mlp.gate.weight",),
            "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
            f"{_EXPERTS}linear_fc1.weight": ("mlp.experts.gate_up_proj",),
            f"{_EXPERTS}linear_fc2.weight": ("mlp.experts.down_proj",),
            "mlp.shared_experts.linear_fc1.weight": (
                "mlp.shared_experts.gate_proj.weight",
                "mlp.shared_experts.up_proj.weight",
            ),
            "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
        },
        pairs_are_neighbours=False,
        inputs_first=False,
        shared_is_several=False,
    ),
}
# transformers' models whose shared expert has a gate, as Qwen2-MoE, call it by one name; GLM-4.5 has none, and another.
_GATE = "mlp.shared_experts.gate_weight"
_GATED_SHARED: Mapping[str, tuple[str, ...]] = {
    _GATE: ("mlp.shared_expert_gate.weight",),
    "mlp.shared_experts.linear_fc1.weight": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_expert.down_proj.weight",),
}


def naming_of(kind: str, names: Collection[str]) -> Naming:
    """Return the names of a kind of model, of `NAMINGS`, as far as they depend on what was saved.

    Args:
        kind: A key of `NAMINGS`.
        names: Megatron-LM's, of the tensors of one of its checkpoints.
    """
    naming = NAMINGS[kind]
    if kind == "huggingface" and any(name.endswith(_GATE) for name in names):
        return replace(naming, parts={**naming.parts, **_GATED_SHARED})
    return naming


def taken_apart(name: str, tensor: Tensor, heads: Heads, naming: Naming) -> tuple[Tensor, ...]:
    """Return the parts of a layer's tensor, in the order of the names that a naming has for it.

    A group's rows of the fused projection are those of its query heads, its key head and its value head. Moments are
    taken apart as weights are: rows are moved, and nothing is computed.

    Args:
        name: Megatron-LM's, in a layer.
        tensor: Of one layer, whole; of routed experts those of all, expert by expert.
        heads: Of the model.
        naming: Of the result.

    Raises:
        ValueError: The rows of a fused projection do not divide by its heads.
    """
    if name.startswith("self_attention.linear_qkv.") and "layer_norm" not in name:
        return _queries_keys_values(tensor, heads, naming)
    if name.startswith(_EXPERTS):
        return _experts(name, tensor, naming)
    if name.startswith(("mlp.linear_fc1.", "mlp.shared_experts.linear_fc1.")) and "layer_norm" not in name:
        gate, up = tensor.chunk(2)
        return gate, up
    return (tensor,)


def _experts(name: str, weight: Tensor, naming: Naming) -> tuple[Tensor, ...]:
    """Return the parts of fc1_N2FD, gates before the others, or fc2_NDF."""
    parts = weight.chunk(len(naming.parts[name]), dim=1)
    return tuple(each.transpose(1, 2) for each in parts) if naming.inputs_first else parts


def _queries_keys_values(rows: Tensor, heads: Heads, naming: Naming) -> tuple[Tensor, Tensor, Tensor]:
    in_group = heads.num_heads // heads.num_groups
    width, rest = divmod(rows.shape[0], heads.num_groups * (in_group + 2))
    if rest:
        raise ValueError(
            f"{rows.shape[0]} rows do not divide into {heads.num_heads} query, {heads.num_groups} key and "
            f"{heads.num_groups} value heads"
        )
    queries, keys, values = rows.unflatten(0, (heads.num_groups, -1, width)).split([in_group, 1, 1], dim=1)
    if heads.pairs_are_neighbours != naming.pairs_are_neighbours:
        queries, keys = (_paired(each, to_neighbours=naming.pairs_are_neighbours) for each in (queries, keys))
    return queries.flatten(0, 2), keys.flatten(0, 2), values.flatten(0, 2)


def _paired(heads: Tensor, *, to_neighbours: bool) -> Tensor:
    """Return heads (groups x heads x rows) whose rotary pairs are neighbours, or lie half a head apart."""
    shape = (2, -1) if to_neighbours else (-1, 2)
    return heads.unflatten(2, shape).transpose(2, 3).flatten(2, 3)
