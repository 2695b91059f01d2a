"""Model and data of a Megatron-LM run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.errors import Problem
from composer3d.importing.documents_inside import asks_for_end, is_before
from composer3d.importing.indexed_sets import held_out, indexed, weights_and_prefixes
from composer3d.importing.megatron.degrees import forget_split
from composer3d.importing.megatron.mixtures import (
    EXPERTS,
    FACTORY,
    feed_forward_width,
    has_experts,
    judge_without_experts,
    mixture_arguments,
    unlike_a_mixture,
)
from composer3d.importing.translation import Translation

__all__ = ["data", "model"]

_FACTORY = "composer3d.models:llama"
_NOT_HERE = "a model that is not here; name it with --model"
_GPT2_TOKENS = 50257
_UNPLACED = "no_position_embedding"
_CENTRED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
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
    *_CENTRED,
)
_OTHER = ("multi_latent_attention", "qk_layernorm", "add_qkv_bias")


def model(translation: Translation) -> None:
    """Carry a Llama or a mixture of experts by its numbers; another model is to be filled in."""
    t = translation
    is_mixture = has_experts(t)
    unlike = {} if t.options.model is not None else _unlike_a_llama(t) | (unlike_a_mixture(t) if is_mixture else {})
    for key, what in unlike.items():
        t.judge(key, "missing", f"{what}: {_NOT_HERE}")
    verdict, note = "missing", f"{_NOT_HERE}, for {'; '.join(unlike.values())}"
    if t.options.model is not None:
        verdict, note = "derived", "--model is taken in its place"
    elif not unlike:
        _llama(t, mixture_arguments(t) if is_mixture else {})
    if not is_mixture:
        judge_without_experts(t)
    if "model.use" not in t.settings:
        forget_split(t)
    if t.options.model is not None:
        t.judge(_UNPLACED, verdict, note)
    has_learned = not _is_rotary(t) and t.flag(_UNPLACED)
    said = f"no positions: {_NOT_HERE}" if has_learned else "no learned positions, and rotary ones are none"
    t.judge(_UNPLACED, "missing" if has_learned else "equal" if t.flag(_UNPLACED) else "meaningless", said)
    for key in (*_KEYS, *EXPERTS):
        stated = t.get(key) not in (None, False, "none")
        t.judge(key, verdict if stated else "meaningless", note if stated else "no value, or off")


def _is_rotary(t: Translation) -> bool:
    return t.get("position_embedding_type") == "rope" or t.flag("use_rotary_position_embeddings")


def _unlike_a_llama(t: Translation) -> dict[str, str]:
    """Return, by flag, what is not a Llama's: RMSNorm, SwiGLU, rotary positions, no biases."""
    heads, wide, found = t.integer("num_attention_heads"), t.integer("hidden_size"), {}
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        if not t.integer(key):
            found[key] = f"no --{key.replace('_', '-')}"
    if not _is_rotary(t):
        found["position_embedding_type"] = f"{t.get('position_embedding_type', 'learned absolute')} positions"
    if t.get("rotary_percent", 1.0) not in (1, 1.0, None):
        found["rotary_percent"] = "rotary positions of a part of each head"
    if t.get("normalization") != "RMSNorm":
        found["normalization"] = str(t.get("normalization", "LayerNorm"))
    if not t.flag("swiglu"):
        found["swiglu"] = "feed-forwards without SwiGLU"
    elif wide and not feed_forward_width(t):
        found["swiglu"] = f"feed-forwards of width 0, the default beside --hidden-size {wide}"
    if not (t.flag("disable_bias_linear") or ("add_bias_linear" in t and not t.flag("add_bias_linear"))):
        found["add_bias_linear"] = "biases in linear layers"
    if heads and wide and wide % heads:
        found["num_attention_heads"] = f"{heads} heads, which {wide} does not divide into"
    elif heads and wide and t.get("kv_channels") not in (None, wide // heads):
        found["kv_channels"] = f"heads of {t.get('kv_channels')}, where {wide} over {heads} is {wide // heads}"
    return found | {key: key.replace("_", " ") for key in _OTHER if t.get(key)}


def _llama(t: Translation, experts: Mapping[str, Any]) -> None:
    heads = t.integer("num_attention_heads") or 1
    grouped = t.flag("group_query_attention")
    groups = (t.integer("num_query_groups") or heads) if grouped else heads
    width = t.integer("hidden_size") or 1
    arguments: dict[str, Any] = {
        "dim": width,
        "num_layers": t.integer("num_layers") or 1,
        "num_heads": heads,
        "num_kv_heads": groups,
        "ffn_dim": feed_forward_width(t),
        "max_seq_len": t.integer("max_position_embeddings") or t.integer("seq_length") or 2048,
        "rope_theta": float(t.number("rotary_base", 10000) or 10000),
        "norm_eps": float(t.number("norm_epsilon", t.number("layernorm_epsilon", 1e-5)) or 1e-5),
        "tie_embeddings": not t.flag("untie_embeddings_and_output_weights"),
        "dropout": float(t.number("hidden_dropout", 0.1) or 0.0),
        **experts,
    }
    vocabulary = _vocabulary(t)
    if vocabulary is not None:
        arguments["vocab_size"] = vocabulary
    factory, kind = (FACTORY, "a mixture of experts") if experts else (_FACTORY, "a Llama")
    t.put("model.use", factory, reason=f"RMSNorm, SwiGLU, rotary positions and no biases are {kind}")
    t.put("model.args", arguments, reason="the shape's flags, and Megatron-LM's defaults where they are silent")
    note = "initial weights are other draws: start from a checkpoint for the same curve"
    t.judge("num_layers", "changed", note, to="model.args")
    _dropped(t)
    unused = "" if grouped else "group-query-attention is off"
    t.judge("num_query_groups", "carried" if grouped else "ignored-there", unused, to="model.args")
    for key in _CENTRED:
        stored = "a norm's weight is stored there as its difference from 1, and has no weight decay"
        t.judge(key, "equal" if t.flag(key) else "meaningless", stored if t.flag(key) else "off")
    t.judge("make_vocab_size_divisible_by", "derived", "the vocabulary is padded", to="model.args")
    for key in _KEYS:
        t.judge(key, "carried" if t.get(key) is not None else "meaningless", to="model.args")


def _dropped(t: Translation) -> None:
    """Say that attention's weights are not dropped out, also where no flag asks for what is the default."""
    key = "attention_dropout"
    dropped, said = t.number(key, 0.1) or 0.0, "dropout of attention's weights"
    t.judge(key, "missing" if dropped else "equal", said)
    if dropped and key not in t:
        message = f"--attention-dropout is {dropped:g} in Megatron-LM by default, and {said} is not here"
        hint = "--attention-dropout 0 behind -- says that there is none"
        t.problems.append(Problem(message=message, file=t.tree.file, severity="warning", hint=hint))


def _vocabulary(t: Translation) -> int | None:
    """Return the rows of the embedding: padded tokens; None, which is told, where no flag says how many there are."""
    padded, stated = t.integer("padded_vocab_size"), t.integer("vocab_size")
    if not stated and t.text("tokenizer_type") in ("GPT2BPETokenizer", "HFGPT2Tokenizer"):
        stated = _GPT2_TOKENS
    if padded or not stated:
        if not padded:
            message = "no flag says how many tokens there are, which Megatron-LM's tokenizer does: the model's rows"
            hint = "-- --vocab-size N behind the file, or vocab_size in model.args"
            t.problems.append(Problem(message=message, file=t.tree.file, severity="warning", hint=hint))
        return padded
    if t.text("tokenizer_type") in ("NullTokenizer", "NullMultimodalTokenizer") and is_before(t, 18):
        stated += 1  # the end of a document, behind all others; the last of them since core 0.18
    multiple = (t.integer("make_vocab_size_divisible_by") or 128) * (t.integer("tensor_model_parallel_size") or 1)
    return -(-stated // multiple) * multiple


def data(translation: Translation) -> None:
    """Carry mock data, indexed data sets and their blends, and what is held out."""
    t = translation
    if t.flag("mock_data"):
        t.put("data.use", "synthetic", "mock_data")
        if (size := t.integer("vocab_size") or t.integer("padded_vocab_size")) is not None:
            t.put("data.vocab_size", size, "vocab_size", "padded_vocab_size")
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
    is_made_up = "data.use" in t.settings and t.settings["data.use"].value == "synthetic"
    for key in () if asks_for_end(t) else ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"):
        if is_tokens or is_made_up:
            t.judge(key, "meaningless", "the data is tokens" if is_tokens else "the tokens are made up")
        t.judge(key, "missing" if t.get(key) else "meaningless", "write data.tokenizer where the data is text")
