"""Model and data of a Megatron-LM run."""

from __future__ import annotations

from composer3d.importing.documents_inside import asks_for_end
from composer3d.importing.indexed_sets import held_out, indexed, weights_and_prefixes
from composer3d.importing.translation import Translation

__all__ = ["data", "model"]

_FACTORY = "composer3d.models:llama"
_KEYS = (
    "num_layers",
    "encoder_num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "use_rotary_position_embeddings",
    "rotary_base",
    "rotary_percent",
    "normalization",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "disable_bias_linear",
    "add_bias_linear",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "norm_epsilon",
    "layernorm_epsilon",
    "hidden_dropout",
    "attention_dropout",
    "num_experts",
    "moe_layer_freq",
)
# What experts compute: without experts the flags do nothing.
_EXPERTS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_score_function",
    "moe_router_dtype",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_quantile_balancing_ema",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_expert_rank_capacity_factor",
)
_OTHER = (
    "multi_latent_attention",
    "qk_layernorm",
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "add_qkv_bias",
)


def model(translation: Translation) -> None:
    """Carry a Llama by its numbers; another model is to be filled in."""
    t = translation
    if t.options.model is None and _is_llama(t):
        _llama(t)
    note = (
        "--model is taken in its place"
        if t.options.model is not None
        else "a model that is not here; name it with --model"
    )
    verdict = "derived" if t.options.model is not None else "missing"
    for key in _KEYS:
        value = t.get(key)
        t.judge(key, "meaningless" if value is None or value is False else verdict, note)
    has_experts = bool(t.get("num_experts"))
    for key in _EXPERTS:
        stated = has_experts and t.get(key) not in (None, False, "none")
        t.judge(key, verdict if stated else "meaningless", note if stated else "there are no experts, or it is off")


def _is_llama(t: Translation) -> bool:
    """Return whether these flags describe a Llama: RMSNorm, SwiGLU, rotary positions, no biases, no experts."""
    rotary = t.get("position_embedding_type") == "rope" or t.flag("use_rotary_position_embeddings")
    unbiased = t.flag("disable_bias_linear") or ("add_bias_linear" in t and not t.flag("add_bias_linear"))
    wide, heads, width = t.integer("hidden_size"), t.integer("num_attention_heads"), t.get("kv_channels")
    if wide is None or heads is None or t.integer("num_layers") is None:
        return False
    whole = heads > 0 and wide % heads == 0
    return bool(
        rotary
        and unbiased
        and whole
        and t.get("normalization") == "RMSNorm"
        and t.flag("swiglu")
        and not t.get("num_experts")
        and t.get("rotary_percent", 1.0) in (1, 1.0, None)
        and width in (None, wide // heads)
        and not any(t.get(key) for key in _OTHER)
    )


def _llama(t: Translation) -> None:
    heads = t.integer("num_attention_heads") or 1
    grouped = t.flag("group_query_attention")
    groups = (t.integer("num_query_groups") or heads) if grouped else heads
    width = t.integer("hidden_size") or 1
    hidden = t.integer("ffn_hidden_size") or (int(4 * width * 2 / 3) // 64) * 64
    arguments = {
        "dim": width,
        "num_layers": t.integer("num_layers") or 1,
        "num_heads": heads,
        "num_kv_heads": groups,
        "ffn_dim": hidden,
        "max_seq_len": t.integer("max_position_embeddings") or t.integer("seq_length") or 2048,
        "rope_theta": float(t.number("rotary_base", 10000) or 10000),
        "norm_eps": float(t.number("norm_epsilon", t.number("layernorm_epsilon", 1e-5)) or 1e-5),
        "tie_embeddings": not t.flag("untie_embeddings_and_output_weights"),
        "dropout": float(t.number("hidden_dropout", 0.1) or 0.0),
    }
    vocabulary = _vocabulary(t)
    if vocabulary is not None:
        arguments["vocab_size"] = vocabulary
    t.put("model.use", _FACTORY, reason="RMSNorm, SwiGLU, rotary positions and no biases are a Llama")
    t.put("model.args", arguments, reason="the shape's flags, and Megatron-LM's defaults where they are silent")
    note = "initial weights are other draws: start from a checkpoint for the same curve"
    t.judge("num_layers", "changed", note, to="model.args")
    dropped = t.number("attention_dropout", 0.1) or 0.0
    t.judge("attention_dropout", "missing" if dropped else "equal", "dropout of attention's weights")
    unused = "" if grouped else "group-query-attention is off"
    t.judge("num_query_groups", "carried" if grouped else "ignored-there", unused, to="model.args")
    t.judge("make_vocab_size_divisible_by", "derived", "the vocabulary is padded", to="model.args")
    for key in _KEYS:
        t.judge(key, "carried" if t.get(key) is not None else "meaningless", to="model.args")


def _vocabulary(t: Translation) -> int | None:
    padded, stated = t.integer("padded_vocab_size"), t.integer("vocab_size")
    if padded or not stated:
        return padded
    multiple = (t.integer("make_vocab_size_divisible_by") or 128) * (t.integer("tensor_model_parallel_size") or 1)
    return -(-stated // multiple) * multiple


def data(translation: Translation) -> None:
    """Carry mock data, indexed data sets and their blends, and what is held out."""
    t = translation
    if t.flag("mock_data"):
        t.put("data.use", "synthetic", "mock_data")
        t.judge("mock_data", "changed", "other random tokens", to="data.use")
    t.judge("mock_data", "meaningless", "off")
    key = "train_data_path" if t.get("train_data_path") else "data_path"
    found = t.get(key)
    items = [str(item) for item in found] if isinstance(found, list) else str(found or "").split()
    if t.options.data is not None:
        t.judge(key, "derived", "--data names the data")
    elif items:
        weights, prefixes = weights_and_prefixes(items)
        indexed(t, key, prefixes, weights)
        if key == "data_path":
            held_out(t, "split", "969,30,1")
        else:
            t.put("data.evaluation_fraction", 0.0, reason="train-data-path is trained on as a whole")
    for name in ("data_path", "train_data_path"):
        t.judge(name, "ignored-there" if t.get(name) else "meaningless", f"{key} decides")
    for name in ("valid_data_path", "test_data_path"):
        t.judge(name, "missing" if t.get(name) else "meaningless", "evaluation on sets of its own")
    t.judge("split", "ignored-there" if t.get("split") else "meaningless", "it divides data_path alone")
    is_tokens = t.options.data is None and bool(items) and key in t.verdicts and t.verdicts[key].verdict == "carried"
    for key in () if asks_for_end(t) else ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"):
        if is_tokens:
            t.judge(key, "meaningless", "the data is tokens")
        t.judge(key, "missing" if t.get(key) else "meaningless", "write data.tokenizer where the data is text")
