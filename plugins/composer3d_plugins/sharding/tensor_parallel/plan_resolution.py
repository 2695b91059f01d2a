"""Resolution of a plan's patterns into a rule per module, with every mistake found before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from composer3d import PluginError, RunContext, select_fqns
from composer3d.propagation import Kind, Placed, Ranges, kind_of
from composer3d_plugins.sharding.tensor_parallel.fused_projections import parts_of
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import attention_sizes, names_of_modules, parent_of

__all__ = [
    "CONTRACTING",
    "EXPANDING",
    "Rule",
    "Rules",
    "Style",
    "check_rules",
    "check_covered",
    "features",
    "levels_of",
    "region_of",
    "resolve",
]

Style = Literal[
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "vocab",
    "head",
    "attention",
    "sequence",
    "local",
    "replicate",
    "split",
    "gather",
    "split_gather",
]
EXPANDING = ("colwise", "packed_colwise")
CONTRACTING = ("rowwise", "packed_rowwise")
WANTED: Mapping[str, tuple[Kind, ...]] = {
    **dict.fromkeys((*EXPANDING, *CONTRACTING, "head"), ("linear", "transposed")),
    "vocab": ("embedding",),
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A plan's decision for one module.

    Args:
        style: One of the plan's styles; "weights", which none can state, of modules whose code multiplies parameters.
        parts: Sizes of the parts of a packed projection, along the dim that is sharded.
        is_sharded: Whether activations are sharded along the sequence there, if they are at all.
        gathered: Indices of the parts that are all-gathered where code takes them, as a key that all heads share is.
        weights: Parameters of the module's own that are sharded, by their names in it.
        dim: Of a module that works on a sharded sequence, where a dry run has shown it: the dim of its input.
        levels: Of an expanding projection, where a dry run has shown it: how many modules up lies the one around it
            that holds all that contract its result.
    """

    style: Style | Literal["weights"]
    parts: tuple[int, ...] | None = None
    is_sharded: bool = True
    gathered: tuple[int, ...] = ()
    weights: tuple[tuple[str, Placed], ...] = ()
    dim: int | None = None
    levels: int | None = None

    @property
    def ranges(self) -> Ranges:
        """The features of the parts that are gathered."""
        parts = self.parts or ()
        return frozenset((sum(parts[:at]), sum(parts[: at + 1])) for at in self.gathered)


Rules = dict[str, Rule]


def resolve(plan: Mapping[str, Rule], context: RunContext) -> Rules:
    """Return the rule of every module that a pattern matches, in the model's order.

    Raises:
        PatternError: A pattern matches nothing.
        PluginError: Two patterns say different things about one module.
    """
    found: dict[str, tuple[str, Rule]] = {}
    for pattern, rule in plan.items():
        for fqn in select_fqns(pattern, context.fqns):
            other, earlier = found.setdefault(fqn, (pattern, rule))
            if earlier != rule:
                raise PluginError(
                    f'plan says of "{fqn}" "{earlier.style}" by "{other}", and "{rule.style}" by "{pattern}"'
                )
    return {fqn: found[fqn][1] for fqn in context.fqns if fqn in found}


def region_of(fqn: str, rules: Rules) -> str | None:
    """Return the module around an expanding projection that holds what contracts its result, None if none does.

    Where no dry run has shown what does, it is the nearest one that holds a contracting projection.
    """
    if (levels := rules[fqn].levels) is not None:
        return ".".join(fqn.split(".")[:-levels])
    ends = [other for other, rule in rules.items() if rule.style in CONTRACTING]
    while fqn:
        fqn = fqn.rpartition(".")[0]
        if any(not fqn or other.startswith(f"{fqn}.") for other in ends):
            return fqn
    return None


def levels_of(block: nn.Module, name: str, ends: Sequence[str]) -> int:
    """Return how many modules up from one of several lies the nearest that holds them all, and has a forward."""
    around = owner_of(name)
    while around and not (
        all(end.startswith(f"{around}.") for end in ends)
        and type(block.get_submodule(around)).forward is not nn.Module.forward
    ):
        around = owner_of(around)
    return len(name.split(".")) - len(around.split(".") if around else [])


def check_rules(
    model: nn.Module,
    rules: Rules,
    context: RunContext,
    unread: Collection[str] = (),
    *,
    is_derived: bool = False,
) -> Rules:
    """Refuse what cannot be sharded, and fill in the parts of packed projections.

    Args:
        model: The whole model.
        rules: By FQN.
        unread: Names of tied parameters by which no code reads them.
        is_derived: Whether the model's code was run with them, so that its heads divide.

    Raises:
        PluginError: With the module and the numbers.
    """
    degree = context.degrees["tp"]
    result: Rules = {}
    for fqn, rule in rules.items():
        module = model.get_submodule(fqn)
        if rule.style in WANTED and kind_of(module) not in WANTED[rule.style]:
            kinds = "an embedding" if rule.style == "vocab" else "a linear layer with a weight of two dims"
            raise PluginError(f'"{fqn}" is a {type(module).__name__}, and "{rule.style}" shards {kinds}')
        if rule.style == "attention":
            _check_attention(fqn, module, degree)
        if rule.style in ("vocab", "sequence") and getattr(module, "max_norm", None) is not None:
            raise PluginError(
                f'"{fqn}" has max_norm, which rescales its rows as they are looked up, on each rank others than on the '
                f'next, so it cannot be "{rule.style}"',
                hint='write "replicate"',
            )
        if rule.style in ("packed_colwise", "packed_rowwise"):
            rule = replace(rule, parts=parts_of(model, fqn, rule, rules))
        elif rule.parts is not None:
            raise PluginError(f'parts has no effect with "{rule.style}" of "{fqn}"', hint='write "packed_colwise"')
        _check_divides(fqn, module, rule, degree)
        result[fqn] = rule
    _check_pairs(result)
    if not is_derived:
        _check_heads(model, result, degree)
    _check_ties(model, result, context, unread)
    return result


def _check_attention(fqn: str, module: Any, degree: int) -> None:
    from torch import nn

    from composer3d_plugins.sharding.tensor_parallel.attention import why_whole

    if not isinstance(module, nn.MultiheadAttention):
        raise PluginError(f'"{fqn}" is a {type(module).__name__}, and "attention" shards nn.MultiheadAttention')
    reason = why_whole(module, degree)
    if reason is not None:
        raise PluginError(f'"{fqn}" cannot be sharded: {reason}', hint='write "replicate"')


def _check_divides(fqn: str, module: Any, rule: Rule, degree: int) -> None:
    what, size = "", 0
    if rule.parts is not None:
        bad = [part for part in rule.parts if part % degree]
        if bad:
            raise PluginError(
                f'"{fqn}": its part of {bad[0]} features (of {list(rule.parts)}) does not divide by tp = {degree}'
            )
    elif rule.style in ("colwise", "head"):
        what, size = "output features", features(module)[1]
    elif rule.style == "rowwise":
        what, size = "input features", features(module)[0]
    elif rule.style == "vocab":
        what, size = "rows", module.weight.shape[0]
    if size % degree:
        raise PluginError(f'"{fqn}": its {size} {what} do not divide by tp = {degree}')


def features(module: Any) -> tuple[int, int]:
    """Return how many features a linear layer takes and gives."""
    rows, columns = module.weight.shape
    return (columns, rows) if kind_of(module) == "linear" else (rows, columns)


def _check_pairs(rules: Rules) -> None:
    """Refuse unpaired projections: an expanding one leaves y_BS(F/T), which only a contracting one reduces to y_BSD."""
    starts = [fqn for fqn, rule in rules.items() if rule.style in EXPANDING]
    regions = {fqn: region_of(fqn, rules) for fqn in starts}
    for fqn, region in regions.items():
        if region is None:
            raise PluginError(
                f'"{fqn}" is "{rules[fqn].style}", and no module around it holds a "rowwise" one that reduces its '
                "sharded result",
                hint='plan that one, or write "head" for a projection whose result is the output',
            )
    # Code that multiplies sharded parameters gives such an input, too.
    givers = [region for region in regions.values() if region is not None]
    givers += [fqn for fqn, rule in rules.items() if rule.style == "weights"]
    for fqn, rule in rules.items():
        if rule.style in CONTRACTING and not any(not each or fqn.startswith(f"{each}.") for each in givers):
            raise PluginError(
                f'"{fqn}" is "{rule.style}", and no "colwise" module beside it gives it a sharded input',
                hint="plan the projections that feed it too",
            )


def _check_heads(model: nn.Module, rules: Rules, degree: int) -> None:
    for fqn, rule in rules.items():
        if rule.style not in EXPANDING:
            continue
        parent = parent_of(model, fqn)
        contracting = [
            features(model.get_submodule(other))[0]
            for other, that in rules.items()
            if that.style in CONTRACTING and other.rpartition(".")[0] == fqn.rpartition(".")[0]
        ]
        sizes = attention_sizes(parent, contracting)
        if sizes is None:
            continue
        for part in rule.parts or (features(model.get_submodule(fqn))[1],):
            heads, rest = divmod(part, sizes.head_dim)
            if rest == 0 and heads % degree and heads in (sizes.num_heads, sizes.num_kv_heads):
                kind = "heads" if heads == sizes.num_heads else "key-value heads"
                raise PluginError(f'"{fqn}": its {heads} {kind} do not divide by tp = {degree}')


def _check_ties(model: nn.Module, rules: Rules, context: RunContext, unread: Collection[str]) -> None:
    """Refuse ties with two layouts: one tensor has one, whatever modules hold it."""
    first_name = names_of_modules(model) if context.ties else {}  # a shared module's rule stands under its first one

    def layout(name: str) -> tuple[str, Any]:
        rule = rules.get(first_name[name.rpartition(".")[0]])
        if rule is not None and rule.style == "weights":
            return "whole", None  # tied parameters are none of those that are sharded
        if rule is not None and rule.style == "attention":
            return name.rpartition(".")[2], None
        if rule is None or rule.style in ("replicate", "split", "gather", "split_gather"):
            return "whole", None
        return ("rows", None) if rule.style in ("vocab", "head", "colwise") else (rule.style, rule.parts)

    for names in context.ties:
        group = [name for name in names if name not in unread]
        for name in group[1:]:
            if layout(name) != layout(group[0]):
                first, second = (n.rpartition(".")[0] for n in (group[0], name))
                styles = [rules[n].style if n in rules else "replicate" for n in (first, second)]
                raise PluginError(
                    f'"{group[0]}" and "{name}" are one tensor, but "{first}" is "{styles[0]}" and "{second}" is '
                    f'"{styles[1]}"',
                    hint='give both one style in plan ("vocab" and "head": an embedding and its head), or neither',
                )


def check_covered(model: nn.Module, rules: Rules) -> None:
    """Refuse a plan with sequence_parallel that leaves open what happens to a parameter.

    Raises:
        PluginError: With the parameter's owner.
    """
    for fqn, _ in _owners(model):
        if fqn not in rules and not any(
            fqn.startswith(f"{name}.") and rules[name].style == "replicate" for name in rules
        ):
            raise PluginError(
                f'sequence_parallel: plan does not say whether "{fqn or "the root"}", which has parameters, works on '
                "activations that are sharded along the sequence",
                hint='write "sequence" if it does, else "replicate"',
            )


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for fqn, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield fqn, module
