"""Rules of what lies outside of blocks: the embedding of tokens, and heads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from composer3d import RunContext, torch_compat
from composer3d.propagation import Traced, kind_of, plain
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rule, Rules, Style
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import first_names

__all__ = ["READ", "gathering_rules", "rules_outside", "without_layers"]

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


def gathering_rules(model: nn.Module, names: Iterable[str], traced: Traced, context: RunContext) -> Rules:
    """Return rules for linear layers none of which meets another one with sharded features, as in a residual network.

    Each computes its rows of features of a whole input, and gathers them, which is right whatever the code does next.

    Args:
        model: The whole model.
        names: Modules that stay whole otherwise: of several blocks of one form those of the first.
        traced: The model's forward.
        context: With degrees and ties.
    """
    tied = {name for group in context.ties for name in group}
    rules: Rules = {}
    for name in names:
        first, group = next(
            (
                (first, group)
                for first, group in traced.forms.items()
                if f"{name}.".startswith(f"{first}.") or not first
            ),
            (name, [name]),
        )
        for fqn in [other + name.removeprefix(first) for other in group] if first else [name]:
            module = dict(model.named_modules()).get(fqn)
            is_plain = type(module) is nn.Linear and module.out_features % context.degrees["tp"] == 0
            if is_plain and fqn not in traced.read and f"{fqn}.weight" not in tied:
                rules[fqn] = Rule(style="head")
    return rules


def without_layers(model: nn.Module) -> tuple[str, str]:
    """Return what is said of a model without layers that can be sharded, and what to do: whose its weights are."""
    text, own, kinds = "it has no linear layers and no embeddings", [], set()
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(owner_of(name))
        if parameter.ndim > 1 and type(owner).__module__.startswith("torch.nn."):
            kinds.add(type(owner).__name__)
        elif parameter.ndim > 1:
            own.append(name)
    if kinds and not own:
        return (
            f"{text}; weights of {' and '.join(sorted(kinds))} stay whole",
            "leave tp at 1: a data-parallel plugin shards any model",
        )
    text += f', but {len(own)} parameters that its own code multiplies, such as "{own[0]}"' if own else ""
    return text, "make linear layers of its projections"
