"""Mixtures of experts of Megatron-LM, as arguments of `composer3d.models:moe`."""

from __future__ import annotations

import re
from typing import Any

from composer3d.importing.translation import Translation

__all__ = [
    "EXPERTS",
    "FACTORY",
    "feed_forward_width",
    "has_experts",
    "judge_without_experts",
    "mixture_arguments",
    "unlike_a_mixture",
]

FACTORY = "composer3d.models:moe"
_WIDE, _SHARED, _FREQUENCY = "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"
_TOP, _SCORES, _BEFORE = "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"
_GROUPS, _TOP_GROUPS, _DEVICES = "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"
_BALANCING, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_BIASED, _RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
_CAPACITY = "moe_expert_capacity_factor"
_ASSIGNED = "sinkhorn"  # routing that has scores of its own
# Of which an expert or the choice of experts is another one than that of the factory.
_OTHERS = {
    "moe_shared_expert_gate": "a gate of the shared experts",
    "moe_apply_probs_on_input": "weights of experts on their inputs, in place of their results",
    "moe_latent_size": "experts in a narrower space than the residual stream's",
}
_BALANCES = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "microbatch"}
# What training does besides, and the factory does not.
_BESIDES = {
    _CAPACITY: "tokens beyond an expert's capacity are dropped there; none is here",
    "moe_input_jitter_eps": "noise on what the router reads",
    "moe_router_force_load_balancing": "routing by random numbers, of benchmarks",
    "moe_router_force_biased": "routing by random biases, of benchmarks",
}
EXPERTS = (
    "num_experts",
    _FREQUENCY,
    _WIDE,
    _SHARED,
    _TOP,
    _SCORES,
    _BEFORE,
    "moe_router_topk_scaling_factor",
    _GROUPS,
    _TOP_GROUPS,
    _DEVICES,
    _BALANCING,
    _COEFFICIENT,
    "moe_z_loss_coeff",
    _BIASED,
    _RATE,
    "moe_router_quantile_balancing_ema",
    "moe_router_dtype",
    *_BESIDES,
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_expert_rank_capacity_factor",
    *_OTHERS,
)


def has_experts(t: Translation) -> bool:
    """Return whether layers have experts."""
    return bool(t.integer("num_experts"))


def judge_without_experts(t: Translation) -> None:
    """Judge flags of experts where there are none."""
    for key in EXPERTS:
        t.judge(key, "meaningless", "there are no experts")


def unlike_a_mixture(t: Translation) -> dict[str, str]:
    """Return, by flag, what the factory has not; empty where it computes what these flags describe."""
    found = {key: what for key, what in _OTHERS.items() if t.get(key) not in (None, False)}
    if t.flag(_BIASED) and t.text(_SCORES, "softmax") == "softmax":
        found[_BIASED] = "biases of softmax scores, which Megatron-LM refuses"
    if _dense_layers(t) is None:
        found[_FREQUENCY] = "dense layers elsewhere than before all others"
    scores, top = t.text(_SCORES, "softmax"), _top(t)
    if scores not in ("softmax", "sigmoid"):
        found[_SCORES] = f"scores by {scores}"
    elif scores == "softmax" and top == 1 and not t.flag(_BEFORE) and _ASSIGNED not in dict(_kinds(t)):
        found[_TOP] = "one expert a token by softmax, which Megatron-LM trains with --moe-router-pre-softmax alone"
    shared, wide = t.integer(_SHARED) or 0, _width(t)
    if shared and wide and shared % wide:
        found[_SHARED] = f"shared experts of {shared}, which is no multiple of an expert's {wide}"
    groups, top_groups = _groups(t)
    if top_groups and not groups:
        t.wrong(_TOP_GROUPS, f"says nothing without --{_GROUPS.replace('_', '-')}")
    elif top_groups and groups and top_groups < groups:
        counted, best = top // top_groups, _best_of_group(t, scores, groups)
        if counted != best:
            found[_TOP_GROUPS] = f"groups by the sum of their {counted} highest scores; here by {best}"
    kinds = _kinds(t)
    other = [kind for kind, _ in kinds if kind not in (*_BALANCES, "none")]
    if other:
        found[_BALANCING] = f"routing by {other[0]}"
    elif len({_BALANCES[kind] for kind, weight in kinds if weight and kind in _BALANCES}) > 1:
        found[_BALANCING] = "two losses of balance at once"
    return found


def mixture_arguments(t: Translation) -> dict[str, Any]:
    """Return the factory's arguments beside those of a Llama, and judge their flags; for what it computes."""
    scores, top, (groups, top_groups) = t.text(_SCORES, "softmax"), _top(t), _groups(t)
    shared, wide = t.integer(_SHARED) or 0, _width(t)
    is_biased = t.flag(_BIASED)
    arguments: dict[str, Any] = {
        "num_experts": t.integer("num_experts"),
        "top_k": top,
        "expert_dim": wide,
        "num_shared_experts": shared // wide,
        "num_dense_layers": _dense_layers(t) or 0,
        "scores": scores,
        "normalise": top > 1 if scores == "sigmoid" else not t.flag(_BEFORE),
        "scale": float(t.number("moe_router_topk_scaling_factor") or 1.0),
        "z_loss": float(t.number("moe_z_loss_coeff") or 0.0),
        "bias_rate": float(t.number(_RATE, 1e-3) or 0.0) if is_biased else 0.0,
        **_balance(t),
    }
    is_grouped = bool(top_groups and groups and top_groups < groups)
    if is_grouped:
        arguments |= {"num_groups": groups, "top_groups": top_groups}
    _judge_balance(t, arguments, is_grouped=is_grouped, is_biased=is_biased)
    _judge_routing(t, is_grouped=is_grouped, is_biased=is_biased)
    for key, what in _BESIDES.items():
        value = t.get(key)
        is_on = value not in (None, False, "none") and not (key == _CAPACITY and (t.number(key) or 0.0) < 0)
        t.judge(key, "missing" if is_on else "meaningless", what if is_on else "off")
    for key in ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_expert_rank_capacity_factor"):
        t.judge(key, "meaningless", "no token is dropped here, and no expert padded")
    for key in EXPERTS:
        t.judge(key, "carried" if t.get(key) not in (None, False) else "meaningless", to="model.args")
    return arguments


def _judge_balance(t: Translation, arguments: dict[str, Any], *, is_grouped: bool, is_biased: bool) -> None:
    kinds = [kind for kind, weight in _kinds(t) if weight and kind in _BALANCES]
    notes = []
    if "global_aux_loss" in kinds:
        notes.append("over the tokens of a step so far there, over those of a micro-batch here")
    if kinds and (is_grouped or is_biased):
        notes.append(
            "counted over the experts that scores alone would choose there, over those that are chosen here, with "
            + " and ".join(["groups"] * is_grouped + ["biases"] * is_biased)
        )
    verdict = "changed" if notes else "carried"
    if not kinds and any(weight for _, weight in _kinds(t)):
        t.judge(_COEFFICIENT, "ignored-there", "there is no loss of balance")
    for key in (_BALANCING, _COEFFICIENT):
        t.judge(key, verdict, "; ".join(notes), to="model.args")


def _judge_routing(t: Translation, *, is_grouped: bool, is_biased: bool) -> None:
    stated, is_narrow = t.get("moe_router_dtype"), t.flag("bf16") or t.flag("fp16")
    differs = stated == "fp64" or (stated in (None, "none") and is_narrow)
    t.judge("moe_router_dtype", "changed" if differs else "equal", "the router computes in float32 at least")
    is_sigmoid = t.text(_SCORES, "softmax") == "sigmoid"
    if is_sigmoid:
        t.judge(_BEFORE, "ignored-there" if t.flag(_BEFORE) else "meaningless", "scores are sigmoids")
    for key in (_GROUPS, _TOP_GROUPS, _DEVICES):
        if not is_grouped:
            t.judge(key, "meaningless", "all groups are chosen from")
    if not is_biased:
        t.judge(_RATE, "meaningless", "there are no biases of experts")
    if t.integer(_SHARED):
        t.judge(_SHARED, "derived", f"so many times the width of an expert, {_width(t)}", to="model.args")
    t.judge(_FREQUENCY, "derived", "the first layers without experts", to="model.args")


def _top(t: Translation) -> int:
    return t.integer(_TOP, 2, least=1) or 2


def feed_forward_width(t: Translation) -> int:
    """Return the width of a dense feed-forward: Megatron-LM's default is four times the model's, as two thirds of it
    under SwiGLU in whole multiples of 64.
    """
    wide = t.integer("hidden_size") or 0
    return t.integer("ffn_hidden_size") or (int(4 * wide * 2 / 3 / 64) * 64 if t.flag("swiglu") else 4 * wide)


def _width(t: Translation) -> int:
    """Return the width of an expert, by default that of a dense feed-forward."""
    return t.integer(_WIDE) or feed_forward_width(t)


def _groups(t: Translation) -> tuple[int | None, int | None]:
    """Return how many groups of experts there are, and how many of them a token chooses from."""
    devices = t.integer(_DEVICES)
    if devices and not t.integer(_TOP_GROUPS):
        return t.integer("expert_model_parallel_size", 1), devices
    return t.integer(_GROUPS), t.integer(_TOP_GROUPS)


def _best_of_group(t: Translation, scores: str, groups: int) -> int:
    """Return of how many experts `composer3d.models:moe` sums the scores of a group."""
    return min(2, (t.integer("num_experts") or 1) // groups) if scores == "sigmoid" else 1


def _kinds(t: Translation) -> list[tuple[str, float]]:
    """Return the kinds of balance with the weights of their losses."""
    kinds, weights = t.get(_BALANCING, "aux_loss"), t.get(_COEFFICIENT, 0.0)
    listed = [str(kind) for kind in (kinds if isinstance(kinds, list) else str(kinds).split())]
    given = weights if isinstance(weights, list) else str(weights).split()
    try:
        numbers = [float(weight) for weight in given]
    except (TypeError, ValueError):
        t.wrong(_COEFFICIENT, "must be numbers")
        numbers = []
    return list(zip(listed, [*numbers, *[0.0] * len(listed)], strict=False))


def _balance(t: Translation) -> dict[str, Any]:
    losses = [(kind, weight) for kind, weight in _kinds(t) if weight and kind in _BALANCES]
    if not losses:
        return {"balance_loss": 0.0}
    return {"balance": _BALANCES[losses[0][0]], "balance_loss": sum(weight for _, weight in losses)}


def _dense_layers(t: Translation) -> int | None:
    """Return how many first layers have no experts; None where others have none besides."""
    stated, layers = t.get(_FREQUENCY, 1), t.integer("num_layers") or 0
    if not layers:
        return 0
    pattern = _pattern(stated, layers)
    if pattern is None or len(pattern) != layers:
        t.wrong(_FREQUENCY, f"must be a number, or a pattern of {layers} layers as ([0]*1+[1]*{max(layers - 1, 1)})")
        return 0
    dense = pattern.index(1) if 1 in pattern else layers
    return dense if all(pattern[dense:]) else None


def _pattern(stated: Any, layers: int) -> list[int] | None:
    """Return 1 for every layer with experts, else 0; None where it does not say."""
    if isinstance(stated, list):
        return [int(each) for each in stated] if all(each in (0, 1) for each in stated) else None
    text = re.sub(r"\s+", "", str(stated))
    if text.isdecimal() and int(text):
        return [int(number % int(text) == 0) for number in range(layers)]
    found = _Pattern(text, layers)
    value = found.sum()
    return value if found.at == len(text) else None


class _Pattern:
    """A sum of lists of 0 and 1, each times a number, as `([1]*3+[0])*2`; read as a text, never evaluated.

    Args:
        text: Without spaces.
        most: Layers; a longer pattern is no pattern.
    """

    def __init__(self, text: str, most: int) -> None:
        self.text, self.most, self.at = text, most, 0

    def sum(self, depth: int = 0) -> list[int] | None:
        """Read terms between plus signs; None where there is none, or too many layers."""
        total: list[int] = []
        while True:
            term = self._term(depth)
            if term is None or len(total) + len(term) > self.most:
                return None
            total += term
            if not self.text.startswith("+", self.at):
                return total
            self.at += 1

    def _term(self, depth: int) -> list[int] | None:
        value = self._list(depth)
        while value is not None and (times := re.compile(r"\*(\d{1,6})").match(self.text, self.at)):
            self.at = times.end()
            value = value * int(times[1]) if len(value) * int(times[1]) <= self.most else None
        return value

    def _list(self, depth: int) -> list[int] | None:
        if self.text.startswith("(", self.at) and depth < 32:
            self.at += 1
            value = self.sum(depth + 1)
            if value is None or not self.text.startswith(")", self.at):
                return None
            self.at += 1
            return value
        numbers = re.compile(r"\[((?:[01],?)*)\]").match(self.text, self.at)
        if numbers is None:
            return None
        self.at = numbers.end()
        return [int(each) for each in numbers[1].replace(",", "")]
