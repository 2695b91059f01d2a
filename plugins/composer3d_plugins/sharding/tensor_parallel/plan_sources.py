"""Plans from their three sources: stated in the manifest, declared by the model, or derived."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, Role, RunContext
from composer3d.propagation import Placed, blocks_beside, blocks_of, kind_of
from composer3d_plugins.sharding.tensor_parallel import auto
from composer3d_plugins.sharding.tensor_parallel.block_code import Codes
from composer3d_plugins.sharding.tensor_parallel.declared import declared, is_by_others
from composer3d_plugins.sharding.tensor_parallel.module_activations import ModuleActivations
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import (
    CONTRACTING,
    EXPANDING,
    Rule,
    Rules,
    check_covered,
    check_rules,
    resolve,
)
from composer3d_plugins.sharding.tensor_parallel.sequence_plan import without_sequence
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import unread_names
from composer3d_plugins.sharding.tensor_parallel.weight_shards import names_of_modules, shard_of_weight

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Made", "make", "planned_shards", "under_every_name"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A resolved plan.

    Args:
        rules: By FQN.
        propagated: Modules whose code is propagated in every forward: blocks whose activations are sharded along the
            sequence, else what lies around projections.
        sizes: This rank's values of attributes that are sizes of the whole model, by module and name.
        gathered: Modules that are given the full sequence where activations around them are sharded.
        given: Of torch's attention modules that are sharded: which of query, key and value are sharded along the
            sequence.
        apart: Modules whose every random draw is on sharded tensors, and the sharded dim if that is one.
        activations: Of modules that are given sharded features, or return such, where their code is not propagated.
        unsharded: Blocks whose activations are not sharded along the sequence by sequence_parallel; "" stands for all.
        sharded: Those whose activations are.
        unread: Names of tied parameters by which no code reads them.
        whole: Parameters that code multiplies and that stay whole, by the reasons.
        is_stated: Whether the rules are the user's; their `is_sharded` states whether activations there are sharded.
    """

    rules: Rules
    propagated: tuple[str, ...] = ()
    sizes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gathered: tuple[str, ...] = ()
    given: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    apart: Mapping[str, Placed | None] = field(default_factory=dict)
    activations: Mapping[str, ModuleActivations] = field(default_factory=dict)
    unsharded: frozenset[str] = frozenset()
    sharded: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_stated: bool = False


def make(model: nn.Module, stated: Mapping[str, Rule] | None, context: RunContext, *, sequence_dim: int | None) -> Made:
    """Return the plan.

    Args:
        model: The whole model.
        stated: Rules by pattern; None derives them.
        sequence_dim: The dim of activations that sequence_parallel shards; None without it.

    Raises:
        PatternError: A pattern matches nothing.
        PluginError: What cannot be sharded, or cannot be derived, and why.
    """
    if stated is None and context.degrees["tp"] == 1:
        return Made(rules={"": Rule(style="replicate")})
    unread = unread_names(model, context)
    if stated is not None:
        rules = check_rules(model, resolve(stated, context), context, unread)
        if sequence_dim is not None:
            check_covered(model, rules)
        if context.degrees["tp"] == 1:
            return Made(rules=rules)
        blocks = _blocks(model, context, sequence_dim)
        codes = Codes(model=model, rules=rules, context=context, blocks=blocks, sequence_dim=sequence_dim)
        sharded = frozenset(blocks if sequence_dim is not None else ())
        return replace(_with_code(codes, unread), is_stated=True, sharded=sharded)
    rules = (declared(model, context) or {}) if sequence_dim is None else {}
    if rules:
        try:
            checked = check_rules(model, rules, context, unread)
            blocks = _blocks(model, context, None)
            codes = Codes(model=model, rules=checked, context=context, blocks=blocks, sequence_dim=None)
            return _with_code(codes, unread)
        except PluginError as error:
            if not is_by_others(model):
                raise
            log.info("tensor_parallel derives a plan: the declared one does not work (%s)", error)
    derived = _derived(model, context, sequence_dim, unread)
    rules = check_rules(model, derived.rules, context, unread, is_derived=True)
    codes = Codes(
        model=model,
        rules=rules,
        context=context,
        blocks=derived.blocks,
        sequence_dim=sequence_dim if derived.is_sharded else None,
        unsharded=derived.unsharded,
        traced=derived.traced,
    )
    every = {fqn for group in derived.traced.forms.values() for fqn in group if derived.is_sharded}
    return replace(_with_code(codes, unread), whole=derived.whole, sharded=frozenset(every - derived.unsharded))


def under_every_name(made: Made, model: nn.Module, context: RunContext) -> Made:
    """Return a plan under every name of modules that have several: a stage may hold one by its second name alone."""
    if context.layout.degree(Role.STAGE) == 1:
        return made
    first, others = names_of_modules(model), dict[str, list[str]]()
    for fqn, name in first.items():
        others.setdefault(name, []).append(fqn)

    def spread(found: Mapping[str, Any]) -> dict[str, Any]:
        whole = {other: value for fqn, value in found.items() for other in others.get(fqn, (fqn,))} | dict(found)
        return {fqn: whole[fqn] for fqn in first if fqn in whole}

    return replace(
        made,
        rules=spread(made.rules),
        propagated=tuple(spread(dict.fromkeys(made.propagated))),
        sizes={(o, name): size for (fqn, name), size in made.sizes.items() for o in others.get(fqn, (fqn,))},
        gathered=tuple(spread(dict.fromkeys(made.gathered))),
        given=spread(made.given),
        apart=spread(made.apart),
        activations=spread(made.activations),
    )


def _derived(model: nn.Module, context: RunContext, sequence_dim: int | None, unread: frozenset[str]) -> auto.Derived:
    """Derive a plan block by block, or of the whole model's code where blocks by themselves have nothing to shard.

    Where no block can work on a shard of the sequence, all do as without sequence_parallel.
    """
    ways: list[tuple[int | None, tuple[str, ...]]] = [(None, _blocks(model, context, None)), (None, ())]
    if sequence_dim is not None:
        ways.insert(0, (sequence_dim, _blocks(model, context, sequence_dim)))
    first: PluginError | None = None
    for dim, blocks in dict.fromkeys(ways):
        try:
            derived = auto.derive(model, context, blocks=blocks, sequence_dim=dim, unread=unread)
        except PluginError as error:
            first = first or error
            continue
        if dim is None and sequence_dim is not None:
            if first is not None:
                log.info("tensor_parallel leaves the sequence whole: along it, %s", first)
            return replace(derived, rules=without_sequence(derived.rules), unsharded=frozenset({""}))
        if dim == sequence_dim and (dim is None or derived.is_sharded):
            return derived
    assert first is not None, "a plan was found, or refused"
    raise first


def _blocks(model: nn.Module, context: RunContext, sequence_dim: int | None) -> tuple[str, ...]:
    """Return the modules whose results are whole; between others a stage of a pipeline may end.

    Activations that one module gives another in shards are no longer known as such on the next stage.
    """
    is_cut = context.layout.degree(Role.STAGE) > 1
    found = blocks_of(model, context, several=sequence_dim is not None or is_cut)
    return tuple(found or (blocks_beside(model) if is_cut else ()))


def planned_shards(model: nn.Module, rules: Rules, degree: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the dim and a rank's runs of every linear layer's weight that rules shard; see `PlannedShards`."""
    outputs, inputs = (*EXPANDING, "head"), CONTRACTING
    return {
        f"{fqn}.weight": shard_of_weight(
            model.get_submodule(fqn), "inputs" if rule.style in inputs else "outputs", rule.parts, degree
        )
        for fqn, rule in rules.items()
        if rule.style in (*outputs, *inputs) and kind_of(model.get_submodule(fqn)) in ("linear", "transposed")
    }


def _with_code(codes: Codes, unread: frozenset[str]) -> Made:
    """Return a plan with how the model's code runs; code that cannot run on meta is propagated.

    Raises:
        PluginError: Heads do not divide by tp, or code needs what other ranks hold.
    """
    found = codes.find()
    return Made(
        rules=codes.rules,
        propagated=tuple(fqn for fqn in codes.context.fqns if fqn in found.propagated),
        sizes=found.sizes,
        gathered=tuple(fqn for fqn in codes.context.fqns if fqn in found.gathered),
        given=found.given,
        apart={fqn: found.apart[fqn] for fqn in codes.context.fqns if fqn in found.apart},
        activations=found.activations,
        unread=unread,
        unsharded=codes.unsharded,
    )
