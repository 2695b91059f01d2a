"""Compressed gradients and weights on the wire of data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    Decisions,
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    Role,
    RunContext,
    Stateful,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    Units,
    hookimpl,
    plugin,
)
from composer3d_plugins.communication.compression.frozen_adam import refuse_moving_variance
from composer3d_plugins.communication.compression.nodes import codec_inside
from composer3d_plugins.communication.compression.wire import Options, Wire

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Compression"]

INTEGERS = ("int8", "int4")
BIASED = ("powersgd", "topk", "onebit")  # what they lose has to be sent later
GRADIENTS = ("bf16", "int8", "fp8", "int4", *BIASED)
WEIGHTS = ("int8", "fp8")
WITHOUT_BLOCKS = ("bf16", "powersgd")
BLOCK = 256


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Send in int8 what is to be compressed."""
    if wanted.compression in (None, "none"):
        return None
    return {what: "int8" for what in ("gradients", "weights") if wanted.compression in (what, "both")}


@plugin(
    family="communication",
    offer=LayoutOffer(table=_table, choices={"compression": ("gradients", "weights", "both")}),
)
class Compression:
    """Send gradients, and weights, in fewer bits between the ranks of data parallelism; sums stay in float32.

    Over dp_shard, gradients of a unit are exchanged in one all-to-all of payloads, decoded and added by their receiver
    in the order of ranks. Over dp_replicate, an all-reduce is that, and an all-gather of the encoded mean: all replicas
    have the same bits. Over both, int4 is for dp_replicate, which is outside: dp_shard, inside of a node, sends int8,
    but where `mesh.gpus_per_node` says that its ranks are on several. Where ranks of one node alone would send int4 it
    is refused: links there are fast, and its errors are 16 times those of int8. Weights are gathered as payloads, which
    their owner decodes too, so that all ranks compute with the same ones; the optimizer steps the exact shards. A block
    of elements shares a scale. Errors of one exchange, relative to a gradient's norm, were 1e-3 for bf16, 6e-3 for
    int8, 2e-2 for fp8 and 1e-1 for int4, with blocks of 256 on four ranks; weights of 8 bits changed gradients by 3e-2
    (int8) and 6e-2 (fp8).
    powersgd, topk and onebit lose most of a gradient. Error feedback keeps what is lost, and adds it to the gradient of
    the next step: over replicas, where it is as large as what a rank holds of the gradient. Over dp_shard it would be
    the whole gradient on every rank. A step that is vetoed leaves nothing behind.
    `verify` proves the run with everything sent as it is, and every codec by itself, element by element.

    Memory: the payloads of the unit at work, twice. Error feedback: two residuals of what a rank holds of the gradient,
        in float32; between the backward and the optimizer's step twice as many.
    Collectives: over dp_shard one all-to-all for every reduce-scatter of a unit; over dp_replicate one all-to-all and
        one all-gather for every all-reduce of a unit, or a bucket, powersgd two of each; all-gathers of payloads.

    Source: Guanhua Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training,
    arXiv:2306.10209; Sai Praneeth Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes, arXiv:1901.09847; Thijs Vogels et al., PowerSGD, arXiv:1905.13727; Hanlin Tang et al., 1-bit Adam,
    arXiv:2102.02888.

    Args:
        gradients: Codec of gradients: bf16, int8, fp8, int4, powersgd, topk or onebit, or `module:callable`, which is
            given `block`, if it takes it, and returns a `composer3d.Codec`; default: they are exchanged in their own
            dtype. onebit is for optimizers whose second moment stands still.
        weights: Codec of gathered weights: int8 or fp8, or `module:callable`; default: they are gathered in their own
            dtype.
        axes: Axes over which gradients are compressed: dp_shard, dp_replicate; default: those with several ranks.
        block: Elements that share a scale, or of which topk sends some.
        rounding: Of integers; stochastic rounding is unbiased, and its error up to twice as large.
        rank: Of powersgd's matrices; default: 4.
        ratio: Part of the elements that topk sends; default: 0.01.
        error_feedback: Whether what is lost is sent later; default: with powersgd, topk and onebit.
        start_step: First step that is compressed; those before exchange everything as it is.
        min_numel: Units with fewer elements are exchanged as they are.
    """

    gradients: str | None = Field(default=None, examples=["int8", "powersgd"])
    weights: str | None = Field(default=None, examples=["int8"])
    axes: tuple[str, ...] | None = None
    block: int = Field(default=BLOCK, ge=8, le=1 << 20, examples=[8])
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rank: int | None = Field(default=None, ge=1, le=1 << 12, examples=[1])
    ratio: float | None = Field(default=None, gt=0, le=1, examples=[])
    error_feedback: bool | None = None
    start_step: int = Field(default=0, ge=0, examples=[1])
    min_numel: int = Field(default=0, ge=0)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse what would compress nothing."""
        self._refuse_unknown()
        self._refuse_without_effect(context)
        axes, shards, replicas = self._axes(context), context.layout.shards, context.layout.replicas
        if self._has_feedback and shards in axes:
            raise PluginError(
                f"error feedback over {shards}: every rank sends a part of the gradient to all others, so that what it "
                "loses would be the whole gradient on every rank",
                hint=f'write axes = ["{replicas}"], or a codec that does without, as gradients = "int8"',
            )
        if self.gradients == "powersgd" and shards in axes:
            raise PluginError(
                f'gradients = "powersgd" over {shards}: its products are of whole matrices, of which a rank keeps a '
                "shard, so that all of them would be sent to all ranks",
                hint=f'write axes = ["{replicas}"], or another codec',
            )
        if shards in axes:
            context.claim("reduce_scatter", by=self)
        if self.weights is not None:
            context.claim("all_gather", by=self)
        inside = codec_inside(self.gradients, axes, context)
        own = {each.name: getattr(self, each.name) for each in fields(Options) if each.name != "inside"}
        context.state[self] = Wire(Options(**{**own, "error_feedback": self._has_feedback}, inside=inside), context)
        if inside != self.gradients:
            context.stash(Decisions).notes.append(
                f"gradients travel in {inside} over {shards}, whose ranks are taken for those of a node, and in "
                f"{self.gradients} over {replicas}: [mesh] gpus_per_node states the ranks of a node"
            )

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Say what is compressed."""
        if self.gradients is not None and self.weights is not None:
            return LayoutTraits(compression="both")
        return LayoutTraits(compression="weights" if self.gradients is None else "gradients")

    @hookimpl
    def composer3d_collectives(self, context: RunContext) -> Transform:
        """Replace the collectives of all units, and of buckets."""
        if self._has_feedback and context.claimants("grad_scaler"):
            raise PluginError(
                "error feedback adds what a step has left over to the next one, and "
                f"{context.claimants('grad_scaler')[0]} scales the losses of both by factors of its own",
                hint="compute in bfloat16, which needs no scale, or write error_feedback = false",
            )
        return Transform(
            name="compression",
            phase=Phase.COMMUNICATE,
            select=self._select,
            apply=self._apply,
            uses=tuple(dict.fromkeys([*self._axes(context), *self._gathered(context)])),
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Begin with the first step that is compressed; draw for stochastic rounding by step and rank."""
        actions = []
        if self.start_step or self.rounding != "nearest" or self._keeps_state:
            actions.append(StepAction(name="compression", point=StepPoint.BEGIN, run=self._begin, gradients=False))
        if self._keeps_state:
            taken = StepAction(
                name="compression.taken", point=StepPoint.AFTER_OPTIMIZER, run=self._taken, gradients=False
            )
            actions.append(taken)
        return actions

    @hookimpl
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Save what error feedback owes, and the factors of powersgd."""
        wire: Wire = context.state[self]
        wire.allocate()
        held: dict[str, Stateful | None] = {"residuals": wire.residuals, "factors": wire.factors}
        return {name: state for name, state in held.items() if state is not None} or None

    @hookimpl
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse optimizers whose second moment goes on with signs."""
        if self.gradients == "onebit":
            refuse_moving_variance(cls, groups, start_step=self.start_step)

    @property
    def _has_feedback(self) -> bool:
        return self.gradients in BIASED if self.error_feedback is None else self.error_feedback

    @property
    def _keeps_state(self) -> bool:
        return self._has_feedback or self.gradients == "powersgd"

    def _refuse_unknown(self) -> None:
        if self.gradients is None and self.weights is None:
            raise PluginError(
                "neither gradients nor weights are to be compressed", hint='write gradients = "int8", for example'
            )
        for what, name, known in (("gradients", self.gradients, GRADIENTS), ("weights", self.weights, WEIGHTS)):
            if name is not None and name not in known and ":" not in name:
                raise PluginError(
                    f'{what} = "{name}" is no codec',
                    hint=f"write {', '.join(known[:-1])} or {known[-1]}, or a codec of your own as module:callable",
                )

    def _refuse_without_effect(self, context: RunContext) -> None:
        num_steps = getattr(context.manifest.train, "steps", None)
        if num_steps is not None and self.start_step >= num_steps:
            raise PluginError(
                f"start_step = {self.start_step}, and the run has {num_steps} steps, the last of which is "
                f"{num_steps - 1}: nothing is compressed",
                hint="lower start_step, or train for longer",
                keys=("start_step",),
            )
        if self.axes is not None and not self.axes:
            raise PluginError("axes = []: nothing is compressed", hint="leave axes out", keys=("axes",))
        twice = next((axis for axis in self.axes or () if (self.axes or ()).count(axis) > 1), None)
        if twice is not None:
            raise PluginError(f'axes: "{twice}" stands twice', hint="leave one of them out", keys=("axes",))
        if self.block != BLOCK and {self.gradients, self.weights} <= {*WITHOUT_BLOCKS, None} and self.gradients:
            raise PluginError(
                f'block has no effect with gradients = "{self.gradients}", which has no blocks',
                hint="leave block out",
                keys=("block",),
            )
        if self.rounding == "stochastic" and not {self.gradients, self.weights} & set(INTEGERS):
            raise PluginError(
                'rounding = "stochastic" is for integers, and none are on the wire',
                hint='write gradients = "int8", or leave rounding out',
            )
        for key, of in (("rank", "powersgd"), ("ratio", "topk")):
            if getattr(self, key) is not None and self.gradients != of:
                raise PluginError(f'{key} has no effect without gradients = "{of}"', hint=f"leave {key} out")
        if self.error_feedback is not None and self.gradients is None:
            raise PluginError(
                "error_feedback is of gradients, and they are not compressed", hint='write gradients = "int8"'
            )

    def _gathered(self, context: RunContext) -> tuple[str, ...]:
        """Return the axes over which weights are compressed."""
        return (context.layout.shards,) if self.weights is not None else ()

    def _axes(self, context: RunContext) -> tuple[str, ...]:
        """Return the axes over which gradients are compressed."""
        shards, replicas = context.layout.shards, context.layout.replicas
        is_sharded = shards in context.owners
        positions = context.layout.names(Role.SEQUENCE)
        # Ranks with other positions of the same samples are with the shards, or with the replicas where there are none.
        beside = {shards: positions if is_sharded else (), replicas: () if is_sharded else positions}
        sent = [axis for axis in (shards, replicas) if axis in context.owners]
        busy = [axis for axis in sent if any(context.degrees[each] > 1 for each in (axis, *beside[axis]))]
        for axis in self.axes or ():
            if axis not in (shards, replicas):
                raise PluginError(
                    f'axes = ["{axis}"]: data parallelism sends nothing over {axis}',
                    hint=f"gradients are reduced over {shards} and {replicas}",
                )
        for axis in (*(self.axes or ()), *self._gathered(context)):
            if axis not in sent:
                raise PluginError(
                    f"no plugin of this manifest {'shards' if axis == shards else 'replicates'} parameters over "
                    f"{axis}, whose exchanges are what is compressed",
                    hint="add a table of the family sharding that owns it: composer3d plugins lists them",
                )
            if axis not in busy:
                raise _nothing_sent(context, [axis, *beside[axis]])
        if self.axes is not None and self.gradients is None:
            raise PluginError("axes are of gradients, and they are not compressed", hint="leave axes out")
        if not sent:
            raise PluginError(
                "no plugin of this manifest shards or replicates parameters, whose exchanges are what is compressed",
                hint="add a table of the family sharding: composer3d plugins lists them",
            )
        if not busy:
            raise _nothing_sent(context, [*sent, *positions])
        if self.gradients is None:
            return ()
        return tuple(busy if self.axes is None else self.axes)

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        numel = sum(parameter.numel() for parameter in model.parameters())
        if self.min_numel > numel:
            raise PluginError(
                f"min_numel = {self.min_numel}, and the whole model has {numel} elements: nothing is compressed",
                hint="lower min_numel, or leave it out",
                keys=("min_numel",),
            )
        return context.units(None)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        wire: Wire = context.state[self]
        axes = self._axes(context)
        for module in model.modules():
            unit = context.stash(Units).by_module.get(module)
            if unit is None:
                continue
            if context.layout.shards in axes:
                unit.set_reduce_scatter(wire.reduce_scatter)
            if self.weights is not None:
                unit.set_all_gather(wire.all_gather)
        if context.layout.replicas in axes:
            wire.replace_all_reduces()
        return list(fqns)

    def _begin(self, state: StepState) -> None:
        state.context.state[self].begin(state.step)

    def _taken(self, state: StepState) -> None:
        state.context.state[self].taken()


def _nothing_sent(context: RunContext, axes: Sequence[str]) -> PluginError:
    alone = " and ".join(f"{axis} = 1" for axis in dict.fromkeys(axes) if axis in context.degrees)
    return PluginError(
        f"{alone}: no rank sends anything that could be compressed", hint=f"raise {axes[0]}, or remove this table"
    )
