"""Plans declared by models: a `tp_plan` attribute, or the declarations of Hugging Face's models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import PatternError, PluginError, RunContext, select_fqns
from composer3d.propagation import kind_of
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import EXPANDING, Rule, Rules, Style, resolve

if TYPE_CHECKING:
    from torch import nn

__all__ = ["declared", "is_by_others"]

# Hugging Face's names for what these styles do.
NAMES: Mapping[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "vocab": "vocab",
    "embedding_rowwise": "vocab",
    "head": "head",
    "colwise_rep": "head",
    "colwise_gather_output": "head",
    "local": "local",
    "replicated_with_grad_allreduce": "local",
    "replicate": "replicate",
    "replicated": "replicate",
    "sequence": "sequence",
    "sequence_parallel": "sequence",
    # What heads share is propagated, and its gradient summed, by whatever projection it is made.
    "mla_kv_a_proj": "replicate",
}

# Styles of Hugging Face's for experts and what sends tokens to them begin so.
EXPERTS = ("moe_", "ep_", "grouped_gemm")

log = logging.getLogger(__name__)


def declared(model: nn.Module, context: RunContext) -> Rules | None:
    """Return the rules that the model declares; None if it declares none, or Hugging Face's in other styles than here.

    Declarations of transformers that shard nothing but experts are none.

    Experts stay whole: their weights are stacked in parameters that are no projections. A pattern of Hugging Face's
    declarations that matches nothing (a family's plan names parts that a model lacks) is left out; the embedding of
    tokens follows the head that it is tied to.

    Raises:
        PatternError: A pattern of a `tp_plan` of the model's own matches nothing.
        PluginError: A `tp_plan` of the model's own has a style that is not known here.
    """
    own = getattr(model, "tp_plan", None)
    base = _of_base(model)
    plan: Mapping[str, Any] = own if isinstance(own, Mapping) and own else base
    rules: Rules = {}
    whole: Rules = {}
    for pattern, style in plan.items():
        try:
            select_fqns(pattern, [*context.fqns, *context.parameter_fqns])
        except PatternError:
            if base:
                continue
            raise
        experts = _experts_of(pattern, style, context)
        if experts:
            log.info('tensor_parallel leaves "%s" whole: "%s" is for experts', pattern, style)
            whole |= dict.fromkeys(experts, Rule(style="replicate"))
            continue
        if style not in NAMES and base:
            # transformers' plan, which the user did not write, and the code tells more than it does.
            log.info('tensor_parallel derives a plan: the declared style "%s" of "%s" is not known', style, pattern)
            return None
        if style not in NAMES:
            raise PluginError(
                f'the model declares the style "{style}" for "{pattern}", which is not one of: '
                + ", ".join(sorted(NAMES)),
                hint="write the plan",
            )
        rules |= resolve({pattern: Rule(style=NAMES[style], is_sharded=False)}, context)
    for fqn, rule in rules.items():
        if rule.style in ("colwise", "vocab") and kind_of(model.get_submodule(fqn)) == "embedding":
            rules[fqn] = Rule(style="vocab", is_sharded=False)
    inside = tuple(f"{fqn}." for fqn in whole)
    rules = {fqn: rule for fqn, rule in rules.items() if not fqn.startswith(inside)} | whole
    if base and not any(rule.style in EXPANDING for rule in rules.values()):
        # It is about experts alone; the code tells what else can be sharded.
        return None
    return _with_ties(model, rules, context) or None


def _experts_of(pattern: str, style: str, context: RunContext) -> list[str]:
    """Return the modules that a declaration for experts is about: named itself, or one of their stacked weights is."""
    try:
        modules = select_fqns(pattern, context.fqns)
    except PatternError:
        return sorted({name.rpartition(".")[0] for name in select_fqns(pattern, context.parameter_fqns)})
    return list(modules) if style.startswith(EXPERTS) else []


def is_by_others(model: nn.Module) -> bool:
    """Return whether a plan is declared by transformers, not by the model's author: the code may tell more than it."""
    return bool(_of_base(model))


def _of_base(model: Any) -> Mapping[str, Any]:
    """Join what a Hugging Face model declares for itself with what its configuration does for its inner model."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {**{f"{inner}{pattern}": style for pattern, style in base.items()}, **plan}


def _with_ties(model: nn.Module, rules: Rules, context: RunContext) -> Rules:
    for group in context.ties:
        owners = [name.rpartition(".")[0] for name in group]
        if any(owner in rules and rules[owner].style == "head" for owner in owners):
            for owner in owners:
                if kind_of(model.get_submodule(owner)) == "embedding":
                    rules.setdefault(owner, Rule(style="vocab", is_sharded=False))
    return rules
