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
from composer3d.propagation import Call, PropagationError, Traced, kind_of, reader_of, trace
from composer3d_plugins.sharding.tensor_parallel.attention import why_whole
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from composer3d_plugins.sharding.tensor_parallel.embedding_and_head import (
    READ,
    gathering_rules,
    rules_outside,
    without_layers,
)
from composer3d_plugins.sharding.tensor_parallel.module_roles import Roles, roles_of
from composer3d_plugins.sharding.tensor_parallel.multiplied_parameters import WeightSearch, multiplied
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import EXPANDING, Rule, Rules, features, levels_of
from composer3d_plugins.sharding.tensor_parallel.sequence_plan import (
    along_sequence,
    sharded_blocks,
    with_boundaries,
    without_sequence,
)
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import gives_features

__all__ = ["Derived", "derive"]

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Derivation:
    """The roles of one block's linear layers, found by trial.

    Attributes:
        reasons: Why layers stay replicated, by FQN.
        edges: Where the code takes results apart.
        fused: Into how many equal parts layers may yet be taken apart.
        gathered: Parts that are gathered where code takes them, by the features they begin and end with.
        first: What went wrong first with a layer, before it was taken for a fused one.
        read: FQNs in the model of modules whose parameters code outside of them reads.
    """

    block: nn.Module
    fqn: str
    call: Call
    degree: int
    read: frozenset[str] = frozenset()
    expanding: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    edges: dict[str, set[int]] = field(default_factory=dict)
    fused: dict[str, list[int]] = field(default_factory=dict)
    gathered: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    first: dict[str, PropagationError] = field(default_factory=dict)

    def run(self) -> BlockDryRun:
        """Return the first run in which every sharded result reaches a layer that contracts it, also in evaluation.

        Raises:
            PropagationError: The block cannot be run by itself; it names no layers.
        """
        for name, module in self.block.named_modules():
            if kind_of(module) in ("linear", "transposed"):
                self._consider(name, module)
        while True:
            gathered = {name: frozenset(ranges) for name, ranges in self.gathered.items()}
            roles = Roles(expanding=dict(self.expanding), gathered=gathered)
            where = self.fqn or type(self.block).__name__
            dry_run, evaluated = (
                BlockDryRun(block=self.block, degree=self.degree, roles=roles, training=mode) for mode in (True, False)
            )
            try:
                dry_run.propagate(self.call, where)
                evaluated.propagate(self.call, where)
            except PropagationError as error:
                if not error.sources:
                    raise
                self._give_way(error)
                continue
            unused = self.expanding.keys() - {name for names, _ in dry_run.contracting.values() for name in names}
            if not unused:
                return dry_run
            for name in unused:
                self._leave(name, "nothing contracts its result")
                if name in dry_run.contracting:
                    del self.reasons[name]

    def _consider(self, name: str, module: nn.Module) -> None:
        size = features(module)[1]
        if self._full(name) in self.read:
            self.reasons[name] = READ
            return
        if not gives_features(module):
            self.reasons[name] = "it gives something else than features"
            return
        if size % self.degree:
            self.reasons[name] = f"its {size} output features do not divide by tp = {self.degree}"
            return
        self.expanding[name] = (size,)
        self.fused[name] = [n for n in (3, 2) if size % (n * self.degree) == 0]

    def _give_way(self, error: PropagationError) -> None:
        """Take what an error is about for fused projections, or leave it whole."""
        sources = sorted(error.sources & self.expanding.keys())
        assert sources, "whatever is sharded comes from a layer that is taken for an expanding one"
        for name in sources:
            self.first.setdefault(name, error)
        if len(sources) == 1:
            (name,) = sources
            size = sum(self.expanding[name])
            if error.edge is not None and self._take_apart(name, size, error.edge):
                return
            if len(self.expanding[name]) == 1 and not self.edges.get(name) and self.fused[name]:
                count = self.fused[name].pop(0)
                self.expanding[name] = (size // count,) * count
                return
        if self._gather(error):
            return
        # The rest may do without the smallest: keys that all heads share, or that are fewer than ranks, say.
        least = min(sum(self.expanding[name]) for name in sources)
        for name in sources:
            if sum(self.expanding[name]) == least:
                self._leave(name, str(self.first[name]))

    def _gather(self, error: PropagationError) -> bool:
        """Gather the smallest part that an error is about, of a layer of which at most half is gathered then."""
        found: list[tuple[int, str, tuple[int, int]]] = []
        for name, start, stop in error.ranges:
            parts, gathered = self.expanding.get(name, ()), self.gathered.get(name, set())
            edges = [sum(parts[:at]) for at in range(len(parts) + 1)]
            for part in zip(edges, edges[1:], strict=False):
                size = part[1] - part[0]
                fits = 2 * (size + sum(last - first for first, last in gathered)) <= sum(parts)
                if start <= part[0] and part[1] <= stop and part not in gathered and fits:
                    found.append((size, name, part))
        if not found:
            return False
        _, name, part = min(found)
        self.gathered.setdefault(name, set()).add(part)
        return True

    def _take_apart(self, name: str, size: int, edge: tuple[int, int]) -> bool:
        known = self.edges.setdefault(name, {0, size})
        found = known | set(edge)
        if found == known or max(found) > size:
            return False
        self.edges[name] = found
        self.gathered.pop(name, None)
        at = sorted(found)
        parts = tuple(last - first for first, last in zip(at, at[1:], strict=False))
        if any(part % self.degree for part in parts):
            return False
        self.expanding[name] = parts
        return True

    def _leave(self, name: str, reason: str) -> None:
        del self.expanding[name]
        self.gathered.pop(name, None)
        self.reasons[name] = reason

    def _full(self, name: str) -> str:
        return ".".join(filter(None, (self.fqn, name)))


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A plan that was found.

    Args:
        rules: What is done to which module.
        blocks: The repeated blocks by which it was found; none where it is of the whole model's code.
        whole: Parameters that code multiplies and that stay whole, by the reasons.
        unsharded: Blocks whose activations are not sharded along the sequence by sequence_parallel; "" stands for all.
        is_sharded: Whether those of any block are.
    """

    rules: Rules
    blocks: tuple[str, ...]
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
            reasons[derivation._full(name)] = reason
            whole.setdefault(reason, []).extend(_named({name: Rule(style="replicate")}, group))
        derivations.append((derivation, found, group))
        reasons |= {derivation._full(name): reason for name, reason in derivation.reasons.items()}
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
        read=[name for name, _ in block.named_modules() if derivation._full(name) in derivation.read],
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
        is_read = derivation._full(name) in derivation.read
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
        if derivation._full(name) in experts
        or reader_of(derivation.block, owner_of(name)) in rules
        or derivation._full(owner_of(name)) in derivation.read
        or derivation._full(name) in tied
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
    why = {name: READ for name in excluded if derivation._full(owner_of(name)) in derivation.read}
    why |= {name: "it is a parameter of several modules" for name in excluded if derivation._full(name) in tied}
    why |= {name: "it is sharded over experts" for name in excluded if derivation._full(name) in experts}
    return found, {**why, **search.reasons}
