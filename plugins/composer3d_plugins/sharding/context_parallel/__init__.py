"""Context parallelism: a long sequence sharded over ranks, for models that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    Batch,
    ComposerError,
    Decisions,
    InsideValues,
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    ReceivedValues,
    Role,
    RunContext,
    StepAction,
    StepState,
    Transform,
    average_whole,
    averaging_action,
    expert_form,
    hookimpl,
    plugin,
    select_fqns,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.planning.hardware import Hardware
    from composer3d.propagation import OutsideValues, PropagatedSequence
    from composer3d_plugins.sharding.context_parallel.eligibility import Found
    from composer3d_plugins.sharding.context_parallel.method_choice import Link
    from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions

__all__ = ["ContextParallel"]

# Modules that do the same with every token, whatever their code: what transformers' experts have in common.
EXPERTS = ("num_experts", "_apply_gate")

GATHERED = "the loss relates positions, by {by}: what the model returns is gathered, and every rank computes it whole"

UNSEEN = (
    "losses of ranks' own positions do not add up to it; let the loss function read it by a name of its file, of an "
    "object that it holds, or of a closure, or let the model return it"
)


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Shard the sequence where `cp` has several ranks."""
    return {} if degrees.get("cp", 1) > 1 else None


@plugin(family="sharding", owns=("cp",), offer=LayoutOffer(table=_table))
class ContextParallel:
    """Shard the sequence over the ranks of cp, which read the same samples; the model's code sees global sizes.

    The model's code is propagated: it computes with sizes, positions and masks of the whole sequence, on local shards.
    What is whole, such as a mask or a table of rotations, is indexed where it meets a shard. Attention, as
    `scaled_dot_product_attention` or written out as products and a softmax, reads the keys and values of all ranks.
    Convolutions and shifts exchange the neighbours that they read. What mixes positions otherwise is gathered and
    computed on every rank, which goes on with its own positions of the result; the rows of the plan name it. Lengths
    that ranks cannot share equally are padded where the model is causal, which changes no loss, count or gradient.

    gather: keys and values are all-gathered, and again in the backward.
    gather_once: they are all-gathered in the forward, and kept: as fast as it gets where they all fit.
    ring: they are passed from rank to rank while blocks are computed: no rank holds them all.
    ulysses: positions are exchanged for heads, of which cp has to be a divisor.
    usp: so are they within groups of neighbouring ranks, between which keys and values are passed around a ring.
    universal: they are all-gathered, and torch's function runs on this rank's rows, with dropout and trained biases.
    What is drawn at random for sharded activations are the numbers that one device draws for a rank's positions, and
    for tensors that every rank has whole those that one device draws. So are weights that attention drops, which
    universal and ulysses compute whatever the method, on torch's math path: always on CPU, and on CUDA where fused
    kernels are off (`sdpa_kernel(SDPBackend.MATH)`). These draw inside, by blocks of their own: other numbers than one
    device's, which `verify` notes.
    Memory: activations / cp; gather and universal: the keys and values of one attention, gather_once: of all whose
        backward is to come; of dropout one mask of all positions at a time; of dropped weights, on the math path,
        S^2 / cp scores and bytes for each head.
    Collectives: an attention, by method: gather 1 all-gather forward, 1 all-gather and 1 reduce-scatter backward;
    gather_once 1 all-gather forward, 1 reduce-scatter backward; ring cp - 1 messages forward, 2 cp - 1 backward;
    ulysses 4 all-to-alls forward, 4 backward; usp these, and a ring's messages among cp / inner_degree ranks; universal
    2 all-gathers forward, 2 reduce-scatters backward, and so do attentions written out as products. A convolution 1
    all-to-all forward, 1 backward.

    Source: Liu et al., Ring Attention, arXiv:2310.01889; Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509; Dubey et
    al., The Llama 3 Herd of Models, arXiv:2407.21783.

    Args:
        method: How attention reads the keys of other ranks; "auto" chooses the one that sends fewest bytes, or that
            waits least on `hardware`; the plan's notes have the figures.
        hardware: Cluster as of `composer3d plan --hardware`, a name or a file, by whose figures "auto" chooses.
        inner_degree: Ranks of such a group; default the most that cp and all heads allow.
        balanced: A rank has one chunk from both ends of the sequence, so that causal attention is equal work for all;
            where inputs show packed documents, by `position_ids`, numbers of documents or masks, as many positions, and
            equal work inside of documents.
        others: Whether what mixes positions and is no attention is gathered, or refused with its module's name.
        rowwise: Patterns of modules that do the same with every token, whatever their code, beside known experts.
        sequence_dim: The dim of inputs and targets that is the sequence; samples are dim 0.
    """

    method: Literal["auto", "gather", "gather_once", "ring", "ulysses", "usp", "universal"] = Field(
        default="auto", examples=["gather", "ring"]
    )
    hardware: str | None = Field(default=None, examples=[])
    inner_degree: int | None = Field(default=None, ge=2, examples=[])
    balanced: bool = True
    others: Literal["gather", "refuse"] = "gather"
    rowwise: tuple[str, ...] = ()
    sequence_dim: int = Field(default=1, ge=1, examples=[])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options without effect, and clusters that are not described."""
        if self.hardware is not None:
            if self.method != "auto":
                raise PluginError(f'hardware has no effect with method = "{self.method}"', hint='write method = "auto"')
            self._cluster()
        if self.inner_degree is not None and self.method != "usp":
            raise PluginError(f'inner_degree has no effect with method = "{self.method}"', hint='write method = "usp"')

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        """Propagate the model's code."""
        return Transform(
            name="context_parallel",
            phase=Phase.TENSOR,
            select=self._select,
            apply=self._apply,
            uses=("cp",),
            rows=self._rows,
            averages=("cp",) if self._averages(context) else (),
            after=("tensor_parallel", "expert_parallel"),
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Average gradients over cp where no data-parallel plugin does."""
        if not self._averages(context):
            return []
        return [averaging_action("context_parallel", _average, context)]

    def _averages(self, context: RunContext) -> bool:
        """Return whether nobody else averages: an owner of an axis of samples does, over those of positions too."""
        batch = context.layout.names(Role.BATCH)
        return context.degrees["cp"] > 1 and not any(axis in context.owners for axis in batch)

    @hookimpl
    def composer3d_place_batch(self, context: RunContext, batch: Batch) -> Batch | None:
        """Shard inputs and targets along the sequence, padded where that is exact."""
        from composer3d_plugins.sharding.context_parallel.batch_placement import Placement

        degree = context.degrees["cp"]
        if degree == 1:
            return None
        found: Found = context.state[self]
        placement = Placement(
            inputs=found.inputs,
            unit=self._unit(degree),
            shares_target=found.shares_output,
            unpadded=found.unpadded,
            positions=lambda length: self._positions(length, degree),
            rank=context.coordinates["cp"],
            by_document=self.balanced and not found.is_captured(),
            relation=lambda target, num_samples, lengths: self._relation(context, target, num_samples, lengths),
            table=found.table,
        )
        placed, found.sequences = placement.place(batch)
        return placed

    def _relation(self, context: RunContext, target: Any, num_samples: int, lengths: tuple[int, ...]) -> str:
        """Return by what the loss relates positions, which a plan reports; empty where it does not."""
        from composer3d_plugins.sharding.context_parallel.loss_positions import Losses

        found: Found = context.state[self]
        if context.loss_fn is None or found.form is None:
            return ""
        if found.losses is None:
            degree = context.degrees["cp"]
            positions = partial(self._positions, degree=degree)
            found.losses = Losses(form=found.form, dim=self.sequence_dim, degree=degree, positions=positions)
        kept = found.kept.read_by(context.loss_fn)
        by = f'what the forward leaves in "{kept}"' if kept else ""
        by = by or found.losses.relation(context.loss_fn, target, num_samples=num_samples, lengths=lengths)
        if by and (note := f"context_parallel: {GATHERED.format(by=by)}") not in (
            notes := context.stash(Decisions).notes
        ):
            notes.append(note)
        return by

    def _cluster(self) -> Hardware | None:
        """Return the described cluster, if there is one."""
        from composer3d.planning.hardware import load_hardware

        try:
            return None if self.hardware is None else load_hardware(self.hardware)
        except ComposerError as error:
            raise PluginError(str(error)) from error

    def _unit(self, degree: int) -> int:
        """Return what lengths are multiples of."""
        return degree * (2 if self.balanced else 1)

    def _positions(self, length: int, degree: int) -> Positions:
        from composer3d_plugins.sharding.context_parallel.sequence_rules import positions_of

        return positions_of(length, degree, is_balanced=self.balanced)

    def _select(self, model: nn.Module, context: RunContext) -> Sequence[str]:
        from composer3d_plugins.sharding.context_parallel.applied_functions import AppliedFunctions
        from composer3d_plugins.sharding.context_parallel.eligibility import dry_run

        degree = context.degrees["cp"]
        if degree > 1:
            stated = {fqn for pattern in self.rowwise for fqn in select_fqns(pattern, context.fqns)}
            known = {fqn for fqn, module in model.named_modules() if _takes_any_tokens(module)}
            rowwise = [fqn for fqn in context.fqns if fqn in stated | known]
            with AppliedFunctions(model, rowwise):
                context.state[self] = dry_run(
                    model,
                    context,
                    degree=degree,
                    unit=self._unit(degree),
                    dim=self.sequence_dim,
                    others=self.others,
                    rowwise=rowwise,
                    method=self.method,
                    inner_degree=self.inner_degree,
                    balanced=self.balanced,
                )
        return [""]

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        found: Found | None = context.state.get(self)
        if found is None:
            return {}
        rows = {name: list(dict.fromkeys(fqns)) for name, fqns in sorted(found.rows.items())}
        return rows | ({"rowwise": list(found.rowwise)} if found.rowwise else {})

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        from composer3d.propagation import PositionDraws, PropagatedSequence
        from composer3d_plugins.sharding.context_parallel.attention_methods import Method
        from composer3d_plugins.sharding.context_parallel.eligibility import begins_of
        from composer3d_plugins.sharding.context_parallel.position_tables import explained
        from composer3d_plugins.sharding.context_parallel.sequence_groups import sequence_group
        from composer3d_plugins.sharding.context_parallel.sequence_outputs import Outputs
        from composer3d_plugins.sharding.context_parallel.sequence_rules import EngineRules

        if context.degrees["cp"] == 1:
            return fqns
        found: Found = context.state[self]
        mesh = context.mesh["cp"]
        rules = EngineRules(
            group=sequence_group(context.mesh, axis="cp", inner_degree=found.inner_degree),
            method=Method(self.method),
            balanced=self.balanced,
            tokens=lambda length: found.sequences.tokens(length),
            link=self._link(mesh),
            decided=context.stash(Decisions).notes.append,
            assigned=lambda length: found.sequences.positions.get(length),
        )
        # What tensor parallelism has sharded takes and returns plain tensors, and computes on DTensors in its hooks, as
        # experts do; but what mixes positions may have parameters that are sharded too: nn.MultiheadAttention.
        mixing = {fqn for fqns_of in found.rows.values() for fqn in fqns_of}
        sharded = {
            fqn
            for fqn, module in model.named_modules()
            if any(hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False))
            and (fqn not in mixing or _holds_experts(module, fqn, context))
            and not _multiplies_experts(module, fqn, context)
        }
        sequence = PropagatedSequence(
            degree=mesh.size(),
            rules=rules,
            blocks=found.blocks,
            rowwise={*found.rowwise, *sharded, *found.converted(model)},
            position_free=sharded.difference(found.rowwise),
            inputs=found.inputs.sharded,
            begins=begins_of(found),
            lengths=found.lengths,
            has_flex=found.has_flex,
            mesh=mesh,
            draws_of=PositionDraws(
                context=context,
                index=rules.index,
                tokens=rules.tokens,
                padded=lambda: found.sequences.unpadded(),
                is_position=found.drawn.is_position,
            ),
            form=lambda: (tuple(found.sequences.lengths.items()), bool(found.sequences.positions)),
        )
        found.is_captured = lambda: sequence.is_captured
        if any(part.is_last and part.module is model for part in context.parts):
            sequence.returned = Outputs(rules=rules, found=found)
        self._install(sequence, model, context)
        model.forward = explained(model.forward, partial(self._padding, context))
        return fqns

    def _install(self, sequence: PropagatedSequence, model: nn.Module, context: RunContext) -> None:
        """Replace forwards; mark what a stage receives; let losses read whole sequences of what the model keeps."""
        from composer3d.propagation import closing_shards
        from composer3d_plugins.sharding.context_parallel.applied_functions import AppliedFunctions

        found: Found = context.state[self]
        sequence.gradients.inputs = lambda args: found.inputs.sharded(args, {})
        own = AppliedFunctions(model, found.rowwise)
        sequence.install(model)
        model.forward = own.guarded(model.forward, lambda: sequence.gradients.at_work())
        received = context.stash(ReceivedValues)
        received.by_module[model] = partial(found.values.given, sequence)
        found.values.sequence_shards = lambda: received.sequence_shards
        inside = context.stash(InsideValues)

        def is_whole() -> bool:
            return found.sequences.gathers or not found.shares_output

        def mode() -> OutsideValues:
            return sequence.outside(found.sequences.unpadded(), "" if is_whole() else UNSEEN)

        inside.axes, inside.mode, inside.hooks = ("cp",), mode, sequence.gradients
        inside.closing = closing_shards(inside, axis="cp")
        inside.later = lambda: sequence.outside(found.sequences.unpadded(), gathers=True)
        inside.are_kept = lambda: bool(found.kept.holders) or sequence.gradients.are_hooked
        sequence.gradients.asking = lambda: inside.asking()
        sequence.gradients.padded, sequence.gradients.is_alike = lambda: found.sequences.unpadded(), is_whole

    def _padding(self, context: RunContext) -> tuple[int, int, str] | None:
        """Return the length and the padded length of the batch at work, and which to use instead."""
        padded = context.state[self].sequences.padded()
        if padded is None:
            return None
        unit = self._unit(context.degrees["cp"])
        lower = padded[0] // unit * unit
        plain = ", or write balanced = false" if self.balanced and padded[0] * 2 % unit == 0 else ""
        return (*padded, f"use {lower or padded[1]} tokens{plain}")

    def _link(self, mesh: DeviceMesh) -> Callable[[str], Link | None]:
        """Return a function of a dtype that returns what is known of the links between the ranks."""
        from composer3d_plugins.sharding.context_parallel.method_choice import link_of

        cluster, ranks = self._cluster(), mesh.mesh.flatten().tolist()
        return lambda dtype: None if cluster is None else link_of(cluster, ranks=ranks, dtype=dtype)


def _takes_any_tokens(module: nn.Module) -> bool:
    """Return whether a module is experts that are called with tokens, in any order, and the choices of each."""
    return expert_form(module) == "chosen" or all(hasattr(module, name) for name in EXPERTS)


def _holds_experts(module: nn.Module, fqn: str, context: RunContext) -> bool:
    """Return whether a module's own parameters have a mesh of their own: it is called with tokens in any order."""
    return any(context.parameter_mesh(f"{fqn}.{name}") for name in module._parameters)


def _multiplies_experts(module: nn.Module, fqn: str, context: RunContext) -> bool:
    """Return whether a module's own code multiplies weights of experts, whatever else it does with a sequence."""
    answers = [context.parameter_mesh(f"{fqn}.{name}") for name in module._parameters]
    return any(answer is not None and not answer.is_rowwise for answer in answers)


def _average(state: StepState) -> None:
    for part in state.parts:
        average_whole(part.module.parameters(), axes=("cp",), context=state.context)
