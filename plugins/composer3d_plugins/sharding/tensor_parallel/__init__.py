"""Tensor parallelism: linear layers sharded over ranks, as Megatron-LM does it.

The modules, in the order in which a composition uses them:

`plan_sources` makes the plan: as stated and resolved (`plan_resolution`), as the model declares it (`declared`), or as
`auto` derives it from a dry run of every block (`block_dry_run`, `module_roles`), with what lies outside of blocks
(`embedding_and_head`), parameters that code multiplies (`multiplied_parameters`) and the sequence (`sequence_plan`).
`block_code` finds the blocks whose own code has to be propagated, and `fitting` the least change under which it can be.
`styles` applies the plan: to parameters (`weight_shards`, `fused_projections`, `tied_parameters`, `local_weights`), and
to activations (`activation_layouts`, `region`, `exchanging_projections`, `attention`, `logits`). `boundary_calls`
watches every forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from composer3d import (
    DataDependent,
    LayoutOffer,
    LayoutTraits,
    ModelFindings,
    Phase,
    PlannedShards,
    PluginError,
    ReceivedValues,
    Role,
    RunContext,
    SequenceProjections,
    Transform,
    hookimpl,
    plugin,
)
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rule, Style

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Planned", "TensorParallel"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Planned:
    """A style with its details.

    Args:
        style: As in the plan.
        parts: Of a packed projection: sizes of what is fused in it, in order; default: what the modules around show.
        sharded: With sequence_parallel: whether activations there are sharded along the sequence.
    """

    style: Style
    parts: tuple[int, ...] | None = None
    sharded: bool = True


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Shard linear layers where `tp` has several ranks."""
    return {"sequence_parallel": bool(wanted.sequence_parallel)} if degrees.get("tp", 1) > 1 else None


@plugin(
    family="sharding",
    owns=("tp",),
    offer=LayoutOffer(table=_table, choices={"sequence_parallel": (False, True)}),
)
class TensorParallel:
    """Shard linear layers, embeddings and heads over the ranks of tp, which all read the same samples.

    A plan says what is done to which module, `{ pattern = style }`:

    colwise: sharded along the outputs; takes replicated activations, leaves sharded ones for a rowwise layer.
    rowwise: sharded along the inputs; its results are summed over ranks.
    packed_colwise, packed_rowwise: the same for several projections in one matrix (query, key and value; gate and up),
        sharded per part: `{ style = "packed_colwise", parts = [64, 32, 32] }`.
    vocab: an embedding sharded along its rows.
    attention: an `nn.MultiheadAttention`, sharded along its heads.
    head: sharded along the outputs, which are gathered, or with loss_parallel stay sharded.
    sequence: a norm or dropout that works on activations sharded along the sequence, or an embedding of positions.
    local: a norm that works on sharded features, such as one a head.
    replicate: left alone.
    split, gather, split_gather: with sequence_parallel, a module whose input is sharded along the sequence, whose
        output is gathered, or both: where neither embedding nor head do it.

    A derived plan also shards parameters of blocks that code multiplies itself (matmul, einsum, F.linear), in pairs as
    layers are; its row `weights` names the modules that own them, whose blocks are propagated.

    The model's code runs on plain tensors of this rank's size. Random functions draw on sharded tensors from the
    sharded stream, other numbers on each rank, and on replicated ones from the replicated stream.
    Memory: what is sharded / tp; with sequence_parallel the activations between blocks / tp too.
    Collectives: a layer of attention and feed-forward has 2 all-reduces forward and 2 backward. With sequence_parallel
    it has 2 all-gathers and 2 reduce-scatters forward, as many backward, and one all-reduce a step for each parameter
    that meets sharded activations. The embedding: 1 all-reduce (reduce-scatter) forward. The head: 1 all-gather of
    logits, or with loss_parallel 2 all-reduces, of one number a token and of three; backward 1 all-reduce. Replicated
    activations or parameters that meet sharded features, such as a key that all heads share: 1 all-reduce of the
    gradient of each. With sequence_parallel what meets them sharded along the sequence, or works along it: 1 all-gather
    forward of each, and 1 reduce-scatter backward where it met sharded features. Parts of a fused projection that all
    heads share, such as PaLM's key: 1 all-gather of each, and 1 all-reduce of its gradient.

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., Reducing Activation Recomputation in
    Large Transformer Models, arXiv:2205.05198.

    Args:
        plan: Styles by pattern; or "auto": what the model declares itself (`tp_plan`, or as Hugging Face's models do;
            not with sequence_parallel, of which declarations say nothing), else what its code does with its
            projections, found by running it on meta. `check` shows the result.
        sequence_parallel: Keep activations outside of sharded layers sharded along the sequence.
        loss_parallel: Leave logits sharded along the vocabulary; of the losses only torch's cross_entropy works on
            them.
        sequence_dim: The dim of activations that is the sequence.
    """

    plan: Literal["auto"] | dict[str, Style | Planned] = "auto"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    sequence_dim: int = Field(default=1, ge=0, examples=[])

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(sequence_parallel=self.sequence_parallel)

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        """Shard what the plan names."""
        return Transform(
            name="tensor_parallel",
            phase=Phase.TENSOR,
            select=self._select,
            apply=self._apply,
            uses=("tp",),
            rows=self._rows,
        )

    def _select(self, model: nn.Module, context: RunContext) -> Sequence[str]:
        from composer3d_plugins.sharding.tensor_parallel.exchanging_projections import planned_exchanges
        from composer3d_plugins.sharding.tensor_parallel.plan_sources import make, planned_shards, under_every_name

        stated = None if self.plan == "auto" else {pattern: _rule(value) for pattern, value in self.plan.items()}
        sequence_dim = self.sequence_dim if self.sequence_parallel else None
        made = context.stash(ModelFindings).of_model(
            model,
            # All that a plan takes of a layout and of other plugins.
            (
                make,
                repr(stated),
                sequence_dim,
                context.degrees["tp"],
                context.layout.degree(Role.STAGE) > 1,
                context.stash(DataDependent).stacked,
            ),
            lambda: make(model, stated, context, sequence_dim=sequence_dim),
            example=context.example,
        )
        if self.loss_parallel and context.degrees["tp"] > 1 and "head" not in {r.style for r in made.rules.values()}:
            raise PluginError(f"loss_parallel has no effect: {_why_no_head(model, made.rules, context.degrees['tp'])}")
        context.state[self] = made = under_every_name(made, model, context)
        if context.degrees["tp"] > 1:
            _refuse_scripted(model, made.rules)
            context.stash(PlannedShards).by_parameter |= planned_shards(model, made.rules, context.degrees["tp"])
        if self.sequence_parallel and context.degrees["tp"] > 1:
            context.stash(SequenceProjections).planned |= planned_exchanges(model, made)
        return [fqn for fqn in made.rules if fqn in context.fqns]

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        made = context.state[self]
        rows: dict[str, list[str]] = {}
        for fqn, rule in made.rules.items():
            rows.setdefault(rule.style, []).append(fqn)
        extra = {
            "sizes": list(dict.fromkeys(fqn for fqn, _ in made.sizes)),
            "gathered": list(made.gathered),
            "propagated": list(made.propagated),
            "whole sequence": [fqn for fqn in context.fqns if fqn in made.unsharded] if self.sequence_parallel else [],
            "gathered parts": [fqn for fqn, rule in made.rules.items() if rule.gathered],
            **{f"whole ({reason})": list(names) for reason, names in made.whole.items()},
        }
        return {style: rows[style] for style in sorted(rows)} | {name: fqns for name, fqns in extra.items() if fqns}

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        from composer3d_plugins.sharding.tensor_parallel.activation_layouts import Activations
        from composer3d_plugins.sharding.tensor_parallel.boundary_calls import watch_boundaries
        from composer3d_plugins.sharding.tensor_parallel.hooked_activations import follow_modules
        from composer3d_plugins.sharding.tensor_parallel.hooked_modules import watch_hooks
        from composer3d_plugins.sharding.tensor_parallel.styles import Applier

        made = context.state[self]
        if context.degrees["tp"] > 1:
            Applier(
                model=model,
                made=made,
                context=context,
                sequence_dim=self.sequence_dim if self.sequence_parallel else None,
                loss_parallel=self.loss_parallel,
            ).apply([fqn for fqn in _named(model, fqns, made.rules) if not _is_elsewhere(model, fqn, context)])
            follow_modules(model, made, Activations.of(context.mesh["tp"], context))
            if self.sequence_parallel:
                context.stash(ReceivedValues).sequence_shards = context.degrees["tp"]
                watch_boundaries(model, made.rules)
                held = {fqn for fqn, _ in model.named_modules()}
                watch_hooks(model, held.intersection(made.sharded), degree=context.degrees["tp"])
        return fqns


def _named(model: nn.Module, fqns: Sequence[str], rules: Collection[str]) -> list[str]:
    """Return one name of each module with a rule, those included that a stage holds by another of their names alone."""
    held = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
    every = [*fqns, *(fqn for fqn in rules if fqn in held.difference(fqns))]
    return list({id(model.get_submodule(fqn)): fqn for fqn in reversed(every)}.values())[::-1]


def _is_elsewhere(model: nn.Module, fqn: str, context: RunContext) -> bool:
    """Return whether another rank along an axis of experts holds a module instead of this one."""
    module = model.get_submodule(fqn)
    absent = [name for name, parameter in module._parameters.items() if parameter is None]
    return len(absent) == len(module._parameters) and any(context.parameter_mesh(f"{fqn}.{name}") for name in absent)


def _refuse_scripted(model: nn.Module, rules: Mapping[str, Rule]) -> None:
    """Refuse functions of torch.jit that may relate features which ranks share: no propagation sees them."""
    from composer3d.propagation import is_elementwise, scripted_functions

    sharded = [fqn for fqn, rule in rules.items() if rule.style != "replicate"]
    for fqn, function in scripted_functions(model).items():
        inside = f"{fqn}." if fqn else ""
        if not is_elementwise(function) and any(f"{each}.".startswith(inside) for each in sharded):
            raise PluginError(
                f'tensor_parallel: "{fqn}" calls {function.name}, which torch.jit has compiled: whether it relates '
                "features that ranks share cannot be seen",
                hint="call the function as it was, without torch.jit.script and torch.jit.trace",
            )


def _why_no_head(model: nn.Module, rules: Mapping[str, Rule], degree: int) -> str:
    """Return why no module of a plan is a head: vocabularies that do not divide, if it has such."""
    from composer3d.propagation import kind_of

    whole: dict[str, Any] = {fqn: model.get_submodule(fqn) for fqn, rule in rules.items() if rule.style == "replicate"}
    rows = {fqn: len(module.weight) for fqn, module in whole.items() if kind_of(module) in ("linear", "embedding")}
    odd = [f'the {number} rows of "{fqn}"' for fqn, number in rows.items() if number % degree]
    if odd:
        return f"{' and '.join(odd)} do not divide by tp = {degree}, so that they stay whole"
    return 'no module of the plan is a "head"'


def _rule(value: Style | Planned | Mapping[str, object]) -> Rule:
    if isinstance(value, Planned):
        return Rule(style=value.style, parts=value.parts, is_sharded=value.sharded)
    assert isinstance(value, str), "pydantic has made the rest Planned"
    return Rule(style=value)
