"""From what a manifest says to what is done: a stated plan, a declared one, or a derived one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer3d import RunContext
from composer3d_plugins.sharding.tensor_parallel import auto
from composer3d_plugins.sharding.tensor_parallel.codes import Codes
from composer3d_plugins.sharding.tensor_parallel.declared import declared
from composer3d_plugins.sharding.tensor_parallel.plan import Rule, Rules, check_covered, check_rules, resolve

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Made", "make"]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A plan.

    Args:
        rules: What is done to which module.
        followed: Modules whose code is followed in every forward: blocks whose activations are cut along the sequence,
            else what lies around projections.
        sizes: This rank's values of attributes that are sizes of the whole model, by module and name.
        apart: Modules that draw random numbers on nothing but cut tensors.
    """

    rules: Rules
    followed: tuple[str, ...] = ()
    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    apart: tuple[str, ...] = ()


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
    if context.degrees["tp"] == 1:
        return Made(rules=rules)
    return _with_code(Codes(model=model, rules=rules, context=context, sequence_dim=sequence_dim))


def _with_code(codes: Codes) -> Made:
    """Say how the model's code is run; where nothing can be seen, it is followed.

    Raises:
        PluginError: Heads do not divide by tp, or code needs what other ranks hold.
    """
    found = codes.find()
    return Made(
        rules=codes.rules,
        followed=tuple(fqn for fqn in codes.context.fqns if fqn in found.followed),
        sizes=found.sizes,
        apart=tuple(fqn for fqn in codes.context.fqns if fqn in found.apart),
    )
