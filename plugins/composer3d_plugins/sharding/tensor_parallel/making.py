"""From what a manifest says to what is done: a stated plan, a declared one, or a derived one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d import PluginError, RunContext, TransformError, select_fqns
from composer3d_plugins.sharding.tensor_parallel import auto
from composer3d_plugins.sharding.tensor_parallel.cuts import SEQUENCE, Unfollowed
from composer3d_plugins.sharding.tensor_parallel.declared import declared
from composer3d_plugins.sharding.tensor_parallel.plan import (
    EXPANDING,
    Rule,
    Rules,
    check_covered,
    check_rules,
    features,
    resolve,
)
from composer3d_plugins.sharding.tensor_parallel.rehearsal import Roles, computes_with_whole_sizes
from composer3d_plugins.sharding.tensor_parallel.trace import Traced, trace

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Made", "make"]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A plan.

    Args:
        rules: What is done to which module.
        follows: Whether the model's code computes with sizes of the whole model, as far as is known.
        blocks: The repeated blocks, where they are known.
    """

    rules: Rules
    follows: bool = False
    blocks: tuple[str, ...] = ()


def make(model: nn.Module, stated: Mapping[str, Rule] | None, context: RunContext, *, sequence_dim: int | None) -> Made:
    """Return the plan.

    Args:
        model: Whole.
        stated: Rules by pattern; None derives them.
        context: The run.
        sequence_dim: The dim of activations that sequence_parallel cuts; None without it.

    Raises:
        PatternError: A pattern matches nothing.
        PluginError: What cannot be cut, or cannot be derived, and why.
    """
    if stated is None and context.degrees["tp"] == 1:
        return Made(rules={"": Rule(style="replicate")})
    if stated is None:
        rules = declared(model, context) if sequence_dim is None else None
        rules = check_rules(model, rules or auto.derive(model, context, sequence_dim=sequence_dim), context)
    else:
        rules = check_rules(model, resolve(stated, context), context)
        if sequence_dim is not None:
            check_covered(model, rules)
    follows = context.degrees["tp"] > 1 and _follows(model, rules, context, sequence_dim)
    try:
        blocks = select_fqns(context.blocks, context.fqns)
    except TransformError:
        blocks = []
    return Made(rules=rules, follows=follows, blocks=tuple(blocks))


def _follows(model: nn.Module, rules: Rules, context: RunContext, sequence_dim: int | None) -> bool:
    """Tell whether cut tensors have to be followed, which costs time; where nothing can be seen, they are.

    Raises:
        PluginError: Heads do not divide by tp, or code needs what other ranks hold.
    """
    try:
        traced = trace(model, context)
    except PluginError:
        return True
    # Every form is looked at: what cannot be followed is refused now, not in the first step.
    return any(
        [
            _form_follows(model, rules, context, sequence_dim=sequence_dim, traced=traced, fqn=fqn)
            for fqn in traced.forms
        ]
    )


def _form_follows(
    model: nn.Module, rules: Rules, context: RunContext, *, sequence_dim: int | None, traced: Traced, fqn: str
) -> bool:
    prefix = f"{fqn}." if fqn else ""
    inner = {name.removeprefix(prefix): (name, rule) for name, rule in rules.items() if name.startswith(prefix)}
    expanding = {
        short: rule.parts or (features(model.get_submodule(name))[1],)
        for short, (name, rule) in inner.items()
        if rule.style in EXPANDING
    }
    local = frozenset(short for short, (_, rule) in inner.items() if rule.style in ("local", "sequence"))
    roles = Roles(expanding=expanding, sequence_dim=sequence_dim, local=local)
    try:
        return computes_with_whole_sizes(
            model.get_submodule(fqn), roles=roles, degree=context.degrees["tp"], call=traced.calls[fqn]
        )
    except Unfollowed as error:
        if not error.divides:
            raise PluginError(f"heads do not divide: {error}") from error
        if error.sources - {SEQUENCE}:
            raise PluginError(f"the plan does not fit the model's code: {error}") from error
        return True
