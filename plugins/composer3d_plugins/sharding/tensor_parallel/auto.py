"""Derivation of a plan from what a model's code does with its projections, not from their names.

Every linear layer of a block is at first taken for an expanding (colwise) one, whose results are sharded. Propagated on
meta, sharded features either reach another linear layer as the features it sums over, which makes a pair of the two
(colwise, rowwise), or something needs all of them: then the layer is taken for a fused one, if the code takes its
result apart, or stays replicated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from composer3d import DataDependent, PluginError, RunContext
from composer3d.propagation import PropagationError, Traced, kind_of, reader_of, trace
from composer3d_plugins.sharding.tensor_parallel.attention import why_whole
from composer3d_plugins.sharding.tensor_parallel.derivation import Derivation
from composer3d_plugins.sharding.tensor_parallel.embedding_and_head import (
    READ,
    gathering_rules,
    rules_outside,
    without_layers,
)
from composer3d_plugins.sharding.tensor_parallel.hooked_modules import has_hooks
from composer3d_plugins.sharding.tensor_parallel.module_roles import roles_of
from composer3d_plugins.sharding.tensor_parallel.multiplied_parameters import WeightSearch, multiplied
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import EXPANDING, Rule, Rules, levels_of
from composer3d_plugins.sharding.tensor_parallel.sequence_plan import (
    along_sequence,
    sharded_blocks,
    with_boundaries,
    without_sequence,
)
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of

__all__ = ["Derived", "derive"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A plan that was found.

    Args:
        rules: What is done to which module.
        blocks: The repeated blocks by which it was found; none where it is of the whole model's code.
        whole: Parameters that code multiplies and that stay whole, by the reasons.
        unsharded: Blocks whose activations are not sharded along the sequence by sequence_parallel; "" stands for all.
        is_sharded: Whether those of any block are.
        traced: Of the model with these blocks.
    """

    rules: Rules
    blocks: tuple[str, ...]
    traced: Traced
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsharded: frozenset[str] = frozenset()
    is_sharded: bool = False


def derive(
    model: nn.Module,
    context: RunContext,
    *,
    blocks: tuple[str, ...],
    sequence_dim: int | None,
    unread: Collection[str] = (),
) -> Derived:
    """Return a rule for every module that is sharded, and for those that work on sharded activations.

    Args:
        model: The whole model.
        blocks: The repeated blocks; none: the whole model is one.
        sequence_dim: The dim of activations that sequence_parallel shards; None without it.
        unread: Names of tied parameters by which no code reads them.

    Raises:
        PluginError: Nothing can be sharded, or the heads do not divide; with the reasons.
    """
    try:
        traced = trace(model, context, blocks=blocks)
    except PluginError:
        why, advice = without_layers(model)
        if "stay whole" not in why or any(kind_of(module) != "other" for module in model.modules()):
            raise
        raise PluginError(f"no plan can be derived for this model: {why}", hint=advice) from None
    derivations, reasons, whole = _derivations(model, context, traced)
    rules: Rules = {}
    for _, found, group in derivations:
        rules |= _named(found, group)
    outside = rules_outside(model, traced, context, unread, reasons)
    rules |= {fqn: rule for fqn, rule in outside.items() if rules.get(fqn, rule).style in (rule.style, "replicate")}
    if not _is_sharding(rules) and sequence_dim is None:
        rules = gathering_rules(model, reasons, traced, context)
    if not _is_sharding(rules):
        shown = "; ".join(f'"{name}": {reason}' for name, reason in list(reasons.items())[:2])
        why, advice = (shown, "write it") if shown else without_layers(model)
        raise PluginError(f"no plan can be derived for this model: {why}", hint=advice)
    for name, reason in reasons.items():
        log.info('tensor_parallel leaves "%s" whole: %s', name, reason)
    sharded: frozenset[str] = frozenset()
    if sequence_dim is not None and list(traced.forms) == [""]:
        log.info("tensor_parallel leaves the sequence whole: the model has no list of blocks to shard it between")
    elif sequence_dim is not None:
        rules, sharded = _with_sequence(model, rules, derivations, traced, sequence_dim)
    unsharded = {fqn for group in traced.forms.values() for fqn in group if sequence_dim is not None} - sharded
    rules = {fqn: rules[fqn] for fqn in context.fqns if fqn in rules}
    return Derived(
        rules=rules,
        blocks=blocks,
        traced=traced,
        whole={why: tuple(names) for why, names in whole.items()},
        unsharded=frozenset(unsharded),
        is_sharded=bool(sharded),
    )


def _is_sharding(rules: Rules) -> bool:
    return any(rule.style in (*EXPANDING, "attention", "vocab", "head", "weights") for rule in rules.values())


def _derivations(
    model: nn.Module, context: RunContext, traced: Traced
) -> tuple[list[tuple[Derivation, Rules, list[str]]], dict[str, str], dict[str, list[str]]]:
    """Derive the rules of one block of each form.

    Returns (what was derived, with the blocks of that form; why modules and parameters stay whole; the parameters that
    do in all blocks, by the reasons).
    """
    reasons: dict[str, str] = {}
    whole: dict[str, list[str]] = {}
    derivations: list[tuple[Derivation, Rules, list[str]]] = []
    for first, group in traced.forms.items():
        derivation = Derivation(
            block=model.get_submodule(first),
            fqn=first,
            call=traced.calls[first],
            degree=context.degrees["tp"],
            read=traced.read,
        )
        try:
            found = _with_heads(derivation, _rules_of(derivation))
        except PropagationError as error:
            reasons[first or type(model).__name__] = str(error)
            continue
        more, left = _multiplied(derivation, found, context)
        found |= more
        for name, reason in left.items():
            reasons[derivation.full(name)] = reason
            whole.setdefault(reason, []).extend(_named({name: Rule(style="replicate")}, group))
        derivations.append((derivation, found, group))
        reasons |= {derivation.full(name): reason for name, reason in derivation.reasons.items()}
    return derivations, reasons, whole


def _with_sequence(
    model: nn.Module,
    rules: Rules,
    derivations: Sequence[tuple[Derivation, Rules, list[str]]],
    traced: Traced,
    sequence_dim: int,
) -> tuple[Rules, frozenset[str]]:
    """Let every block that can work on a sharded sequence; return the rules, and the blocks that do."""
    along: list[Rules | None] = []
    for derivation, found, _ in derivations:
        try:
            along.append(_along(derivation, found, traced, sequence_dim))
        except PropagationError as error:
            log.info('tensor_parallel leaves the sequence whole in "%s": %s', derivation.fqn, error)
            along.append(None)
    able = [fqn for found, (*_, group) in zip(along, derivations, strict=True) for fqn in group if found is not None]
    hooked = [fqn for fqn in able if fqn in traced.hooked or has_hooks(model.get_submodule(fqn))]
    for fqn in hooked:
        log.info('tensor_parallel leaves the sequence whole in "%s": a module of it has hooks, which may read it', fqn)
    able = [fqn for fqn in able if fqn not in hooked]
    sharded = sharded_blocks(model, able, traced)
    for able_rules, (_, found, group) in zip(along, derivations, strict=True):
        rules |= _named(without_sequence(found), [fqn for fqn in group if fqn not in sharded])
        rules |= _named(able_rules or {}, [fqn for fqn in group if fqn in sharded])
    return with_boundaries(rules, flow=traced.flow, sharded=sharded), sharded


def _along(derivation: Derivation, found: Rules, traced: Traced, sequence_dim: int) -> Rules:
    """Return a block's rules for a sharded sequence; raises PropagationError where it needs the full one."""
    block = derivation.block
    if any(rule.style == "weights" for rule in found.values()):
        raise PropagationError("it multiplies parameters")
    return along_sequence(
        block,
        found,
        call=derivation.call,
        degree=derivation.degree,
        roles=functools.partial(roles_of, block, sequence_dim=sequence_dim, observed=True),
        where=derivation.fqn,
        read=[name for name, _ in block.named_modules() if derivation.full(name) in derivation.read],
    )


def _named(rules: Rules, fqns: Sequence[str]) -> Rules:
    """Return the rules of all blocks of one form, given those of one by the FQNs in it."""
    return {".".join(filter(None, (fqn, name))): rule for fqn in fqns for name, rule in rules.items()}


def _rules_of(derivation: Derivation) -> Rules:
    """Return the rules of one block, by the FQNs in it."""
    dry_run = derivation.run()
    rules: Rules = {}
    for name, parts in derivation.expanding.items():
        packed = len(parts) > 1
        rule = Rule(style="packed_colwise" if packed else "colwise", parts=parts if packed else None)
        gathered = derivation.gathered.get(name, set())
        at = tuple(index for index in range(len(parts)) if (sum(parts[:index]), sum(parts[: index + 1])) in gathered)
        ends = [end for end, (sources, _) in dry_run.contracting.items() if name in sources]
        rules[name] = replace(rule, gathered=at, levels=levels_of(derivation.block, name, ends))
    for name, (_, parts) in dry_run.contracting.items():
        packed = len(parts) > 1
        rules[name] = Rule(style="packed_rowwise" if packed else "rowwise", parts=parts if packed else None)
    # What needs its shard of a weight, as a depthwise convolution does, gets it where it is propagated.
    for name in dry_run.local - dry_run.moving:
        is_read = derivation.full(name) in derivation.read
        if next(derivation.block.get_submodule(name).parameters(), None) is not None and not is_read:
            rules[name] = Rule(style="local")
    for name in derivation.reasons:
        rules.setdefault(name, Rule(style="replicate"))
    return rules


def _with_heads(derivation: Derivation, rules: Rules) -> Rules:
    """Shard the heads of torch's own attention modules, whose projections are parameters."""
    for name, module in derivation.block.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        reason = why_whole(module, derivation.degree)
        if reason is not None:
            derivation.reasons[name] = reason
            continue
        prefix = f"{name}." if name else ""
        rules = {inner: rule for inner, rule in rules.items() if not inner.startswith(prefix)}
        derivation.reasons = {i: why for i, why in derivation.reasons.items() if not i.startswith(prefix)}
        rules[name] = Rule(style="attention")
    return rules


def _multiplied(derivation: Derivation, rules: Rules, context: RunContext) -> tuple[Rules, dict[str, str]]:
    """Return the rules of modules of a block whose own code multiplies parameters, and why others stay whole."""
    tied = {name for group in context.ties for name in group}
    experts = context.stash(DataDependent).stacked
    excluded = [
        name
        for name in multiplied(derivation.block)
        if derivation.full(name) in experts
        or reader_of(derivation.block, owner_of(name)) in rules
        or derivation.full(owner_of(name)) in derivation.read
        or derivation.full(name) in tied
    ]
    search = WeightSearch(
        block=derivation.block,
        call=derivation.call,
        degree=derivation.degree,
        roles=roles_of(derivation.block, rules, sequence_dim=None),
        where=derivation.fqn or type(derivation.block).__name__,
        excluded=excluded,
    )
    found = search.rules()
    why = {name: READ for name in excluded if derivation.full(owner_of(name)) in derivation.read}
    why |= {name: "it is a parameter of several modules" for name in excluded if derivation.full(name) in tied}
    why |= {name: "it is sharded over experts" for name in excluded if derivation.full(name) in experts}
    return found, {**why, **search.reasons}
