"""A plan derived from what a model's code does with its projections, not from their names.

Every linear layer of a block is at first taken for an expanding one, whose results are cut. Followed on meta, cut
features either reach another linear layer as the features it sums over, which makes a pair of the two, or something is
done with them that needs all of them: then the layer is taken for a fused one, if the code takes its result apart, or
left whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composer3d import PluginError, RunContext, torch_compat
from composer3d_plugins.sharding.tensor_parallel.attention import why_whole
from composer3d_plugins.sharding.tensor_parallel.cuts import Unfollowed
from composer3d_plugins.sharding.tensor_parallel.plan import Rule, Rules, Style, features
from composer3d_plugins.sharding.tensor_parallel.rehearsal import Rehearsal, Roles
from composer3d_plugins.sharding.tensor_parallel.trace import Call, Traced, trace
from composer3d_plugins.sharding.tensor_parallel.weights import head_counts, kind_of, parent_of

__all__ = ["derive"]

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Derivation:
    """The roles of one block's linear layers, found by trial.

    Attributes:
        reasons: Why layers were left whole.
        edges: Where the code takes results apart.
        fused: Into how many equal parts layers may yet be taken apart.
        first: What went wrong first with a layer, before it was taken for a fused one.
    """

    block: nn.Module
    fqn: str
    call: Call
    degree: int
    expanding: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    edges: dict[str, set[int]] = field(default_factory=dict)
    fused: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, Unfollowed] = field(default_factory=dict)

    def run(self) -> Rehearsal:
        """Return the first run in which every cut result reaches a layer that contracts it.

        Raises:
            PluginError: Heads do not divide by tp.
        """
        for name, module in self.block.named_modules():
            if kind_of(module) in ("linear", "transposed"):
                self._consider(name, module)
        while True:
            rehearsal = Rehearsal(block=self.block, degree=self.degree, roles=Roles(expanding=dict(self.expanding)))
            try:
                rehearsal.follow(self.call, self.fqn or type(self.block).__name__)
            except Unfollowed as error:
                if not error.sources:
                    raise PluginError(str(error), hint="write the plan") from error
                self._give_way(error)
                continue
            unused = self.expanding.keys() - {name for names, _ in rehearsal.contracting.values() for name in names}
            if not unused:
                return rehearsal
            for name in unused:
                self._leave(name, "nothing contracts its result")
                if name in rehearsal.contracting:
                    del self.reasons[name]

    def _consider(self, name: str, module: nn.Module) -> None:
        size = features(module)[1]
        if size % self.degree:
            self.reasons[name] = f"its {size} output features do not divide by tp = {self.degree}"
            return
        self.expanding[name] = (size,)
        self.fused[name] = [n for n in (3, 2) if size % (n * self.degree) == 0]

    def _give_way(self, error: Unfollowed) -> None:
        """Take what an error is about for fused projections, or leave it whole."""
        sources = sorted(error.sources & self.expanding.keys())
        assert sources, "whatever is cut comes from a layer that is taken for an expanding one"
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
        for name in sources:
            # What is told of its heads has to divide; a fused projection in another form may stay whole.
            told = head_counts(parent_of(self.block, name))
            if not self.first[name].divides and (not told or self.first[name].number in told):
                raise PluginError(f'"{self._full(name)}" cannot be cut: {self.first[name]}')
        # The rest may do without the smallest: keys that all heads share, say.
        least = min(sum(self.expanding[name]) for name in sources)
        for name in sources:
            if sum(self.expanding[name]) == least:
                self._leave(name, str(self.first[name]))

    def _take_apart(self, name: str, size: int, edge: tuple[int, int]) -> bool:
        known = self.edges.setdefault(name, {0, size})
        found = known | set(edge)
        if found == known or max(found) > size:
            return False
        self.edges[name] = found
        at = sorted(found)
        parts = tuple(last - first for first, last in zip(at, at[1:], strict=False))
        if any(part % self.degree for part in parts):
            return False
        self.expanding[name] = parts
        return True

    def _leave(self, name: str, reason: str) -> None:
        del self.expanding[name]
        self.reasons[name] = reason

    def _full(self, name: str) -> str:
        return ".".join(filter(None, (self.fqn, name)))


def derive(model: nn.Module, context: RunContext, *, sequence_dim: int | None) -> Rules:
    """Return a rule for every module that is cut, and for those that work on cut activations.

    Raises:
        PluginError: Nothing can be cut, or the heads do not divide; with the reasons.
    """
    traced = trace(model, context)
    if sequence_dim is not None and list(traced.forms) == [""]:
        raise PluginError(
            "sequence_parallel needs to know the repeated blocks, between which activations are cut",
            hint='write [model] blocks = "layers.*"',
        )
    rules: Rules = {}
    reasons: dict[str, str] = {}
    derivations: list[tuple[Derivation, list[str]]] = []
    for first, group in traced.forms.items():
        derivation = Derivation(
            block=model.get_submodule(first), fqn=first, call=traced.calls[first], degree=context.degrees["tp"]
        )
        found = _rules_of(derivation)
        if sequence_dim is None:
            found = _with_heads(derivation, found)
        derivations.append((derivation, group))
        reasons |= {derivation._full(name): reason for name, reason in derivation.reasons.items()}
        rules |= _named(found, group)
    if not any(rule.style in ("colwise", "packed_colwise", "attention") for rule in rules.values()):
        shown = "; ".join(f'"{name}": {reason}' for name, reason in list(reasons.items())[:2])
        raise PluginError(
            f"no plan can be derived for this model: {shown or 'it has no linear layers'}", hint="write it"
        )
    for name, reason in reasons.items():
        log.info('tensor_parallel leaves "%s" whole: %s', name, reason)
    outside = _outside(model, traced, context)
    rules |= {fqn: rule for fqn, rule in outside.items() if rules.get(fqn, rule).style in (rule.style, "replicate")}
    if sequence_dim is not None:
        for derivation, group in derivations:
            rules |= _named(_sequence_rules(derivation, sequence_dim), group)
        _cut_sequence(traced, rules)
    return {fqn: rules[fqn] for fqn in context.fqns if fqn in rules}


def _named(rules: Rules, fqns: Sequence[str]) -> Rules:
    """Return the rules of all blocks of one form, given those of one by the FQNs in it."""
    return {".".join(filter(None, (fqn, name))): rule for fqn in fqns for name, rule in rules.items()}


def _rules_of(derivation: Derivation) -> Rules:
    """Return the rules of one block, by the FQNs in it."""
    rehearsal = derivation.run()
    rules: Rules = {}
    for name, parts in derivation.expanding.items():
        packed = len(parts) > 1
        rules[name] = Rule(style="packed_colwise" if packed else "colwise", parts=parts if packed else None)
    for name, (_, parts) in rehearsal.contracting.items():
        packed = len(parts) > 1
        rules[name] = Rule(style="packed_rowwise" if packed else "rowwise", parts=parts if packed else None)
    for name in rehearsal.local:
        if next(derivation.block.get_submodule(name).parameters(), None) is not None:
            rules[name] = Rule(style="local")
    for name in derivation.reasons:
        rules.setdefault(name, Rule(style="replicate"))
    return rules


def _with_heads(derivation: Derivation, rules: Rules) -> Rules:
    """Cut the heads of torch's own attention modules, whose projections are parameters."""
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


def _sequence_rules(derivation: Derivation, sequence_dim: int) -> Rules:
    """Return the rules of modules that work on activations cut along the sequence.

    Raises:
        PluginError: Something in the block needs the whole sequence.
    """
    roles = Roles(expanding=derivation.expanding, sequence_dim=sequence_dim)
    rehearsal = Rehearsal(block=derivation.block, degree=derivation.degree, roles=roles)
    try:
        rehearsal.follow(derivation.call, derivation.fqn)
    except Unfollowed as error:
        raise PluginError(f"sequence_parallel is not for this model: {error}", hint="leave it out") from error
    return {
        name: Rule(style="sequence")
        for name in rehearsal.whole - rehearsal.contracting.keys()
        if _matters(derivation.block.get_submodule(name))
    }


def _matters(module: Any) -> bool:
    """Tell whether it makes a difference to a module that its input is cut: it has parameters, or draws numbers."""
    return next(module.parameters(), None) is not None or isinstance(getattr(module, "p", None), float)


def _cut_sequence(traced: Traced, rules: Rules) -> None:
    """Cut the sequence at the first block and put it together after the last one.

    Raises:
        PluginError: The model's own code needs it between blocks.
    """
    twice = [fqn for fqn in traced.order if traced.order.count(fqn) > 1]
    if twice:
        raise PluginError(f'sequence_parallel is not for this model: it calls "{twice[0]}" twice', hint="leave it out")
    if traced.between is not None:
        raise PluginError(
            f"sequence_parallel is not for this model: it hands activations from block to block after {traced.between}",
            hint="leave it out",
        )
    if len(traced.order) == 1:
        rules[traced.order[0]] = Rule(style="split_gather")
    else:
        rules[traced.order[0]], rules[traced.order[-1]] = Rule(style="split"), Rule(style="gather")


def _outside(model: nn.Module, traced: Traced, context: RunContext) -> Rules:
    """Return the rules of the head and the embedding of tokens: cut where their rows divide by tp, else whole."""
    degree = context.degrees["tp"]
    modules: dict[str, Any] = {fqn: model.get_submodule(fqn) for fqn in traced.results}
    returned = [leaf for leaf in torch_compat.tree_leaves(_plain(traced.output)) if isinstance(leaf, Tensor)]
    heads = [
        fqn
        for fqn, result in traced.results.items()
        if kind_of(modules[fqn]) == "linear" and any(result is leaf for leaf in returned)
    ]
    rows = {fqn: int(module.weight.shape[0]) for fqn, module in modules.items()}
    tied = {name.rpartition(".")[0] for group in context.ties for name in group}
    embeddings = sorted(
        (fqn for fqn, module in modules.items() if kind_of(module) == "embedding"),
        # The tokens' is the one that is tied, or as large as the head, or the largest.
        key=lambda fqn: (fqn not in tied, rows[fqn] not in [rows[head] for head in heads], -rows[fqn]),
    )
    rules: Rules = {}
    for fqn in [*embeddings[:1], *heads]:
        style: Style = "vocab" if fqn not in heads else "head"
        # A row of the plan says what stays whole: rows that do not divide, or that are rescaled as they are looked up.
        if rows[fqn] % degree or getattr(modules[fqn], "max_norm", None) is not None:
            style = "replicate"
        rules[fqn] = Rule(style=style, is_cut=False)
    # One tensor has one layout: a tie with something that stays whole keeps both whole.
    for group in context.ties:
        owners = [name.rpartition(".")[0] for name in group]
        cut = [owner in rules and rules[owner].style != "replicate" for owner in owners]
        if any(cut) and not all(cut):
            rules |= dict.fromkeys(owners, Rule(style="replicate"))
    return rules


def _plain(output: Any) -> Any:
    """Return what a dictionary-like or dataclass output holds."""
    if isinstance(output, Tensor | tuple | list | dict):
        return output
    return list(vars(output).values()) if hasattr(output, "__dict__") else output
