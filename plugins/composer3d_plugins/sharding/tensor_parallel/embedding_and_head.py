"""Rules of what lies outside of blocks: the embedding of tokens, and heads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from composer3d import RunContext, torch_compat
from composer3d.propagation import Traced, kind_of, plain
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rule, Rules, Style
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import first_names

__all__ = ["READ", "gathered_by_hand", "rules_outside"]

READ = "code outside of it reads its parameters"


def rules_outside(
    model: nn.Module, traced: Traced, context: RunContext, unread: Collection[str], reasons: dict[str, str]
) -> Rules:
    """Return the rules of the head and the embedding of tokens, sharded where their rows divide by tp, else whole.

    Reasons for what stays whole are added.
    """
    degree = context.degrees["tp"]
    modules: dict[str, Any] = {fqn: model.get_submodule(fqn) for fqn in traced.results}
    returned = [leaf for leaf in torch_compat.tree_leaves(plain(traced.output)) if isinstance(leaf, Tensor)]
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
        # A row of the plan says what stays whole.
        if (why := _why_whole(modules[fqn], is_read=fqn in traced.read, degree=degree)) is not None:
            style, reasons[fqn] = "replicate", why
        rules[fqn] = Rule(style=style, is_sharded=False)
    # One tensor has one layout: a tie with something that stays whole keeps both whole, and what these are tied to.
    first_name = first_names(model, context)
    for _ in context.ties:
        for group in context.ties:
            owners = list(dict.fromkeys(first_name[owner_of(name)] for name in group if name not in unread))
            sharded = [owner in rules and rules[owner].style != "replicate" for owner in owners]
            if any(sharded) and not all(sharded):
                rules |= dict.fromkeys(owners, Rule(style="replicate"))
    return rules


def _why_whole(module: Any, *, is_read: bool, degree: int) -> str | None:
    """Return why the rows of a head or an embedding are not sharded; None if they are."""
    rows = int(module.weight.shape[0])
    if rows % degree:
        return f"its {rows} rows do not divide by tp = {degree}"
    if is_read:
        return READ
    return "its rows are rescaled as they are looked up" if getattr(module, "max_norm", None) is not None else None


def gathered_by_hand(model: nn.Module, names: Iterable[str], degree: int) -> str:
    """Return what to write where nothing can be derived: bare linear layers may gather their results.

    Args:
        model: The whole model.
        names: Modules for which there is no rule.
        degree: Of tp.
    """
    modules = dict(model.named_modules())
    bare = [n for n in names if isinstance(m := modules.get(n), nn.Linear) and m.out_features % degree == 0]
    patterns = dict.fromkeys(re.sub(r"\.\d+$", ".*", name) for name in bare)
    if not patterns:
        return "write it"
    plan = ", ".join(f'"{pattern}" = "head"' for pattern in patterns)
    return f"write plan = {{ {plan} }}, which shards their weights and gathers each result"
