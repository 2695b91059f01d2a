"""Compressed gradients and weights on the wire of data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    CodedCollectives,
    CodedExchange,
    Phase,
    PluginError,
    Role,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    Units,
    hookimpl,
    plugin,
    resolve_reference,
    seed_of,
)
from composer3d_plugins.communication.compression.codecs import make_codec
from composer3d_plugins.communication.compression.exchange import (
    CodedAllGather,
    CodedReduceScatter,
    gather_rows,
    reduce_rows,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import Codec

__all__ = ["Compression"]

SHARDS = "dp_shard"
INTEGERS = ("int8", "int4")
GRADIENTS = ("bf16", "int8", "fp8", "int4")
WEIGHTS = ("int8", "fp8")
Travelling = Literal["gradients", "weights"]


@plugin(family="communication")
class Compression:
    """Send gradients, and weights, in fewer bits between the ranks that shard parameters; sums stay in float32.

    Gradients of a unit are exchanged in one all-to-all of payloads, decoded and added by their receiver in the order of
    ranks. Weights are gathered as payloads, which their owner decodes too, so that all ranks compute with the same
    ones; the optimizer steps the exact shards. A block of elements shares a scale. Errors of one exchange, relative
    to a gradient's norm, were 1e-3 for bf16, 6e-3 for int8, 2e-2 for fp8 and 1e-1 for int4, with blocks of 256 on four
    ranks; weights of 8 bits changed gradients by 3e-2 (int8) and 6e-2 (fp8).
    `verify` proves the run with everything sent as it is, and every codec by itself, element by element.

    Memory: the payloads of the unit at work, twice.
    Collectives: one all-to-all for every reduce-scatter of a unit, of a payload for each rank; all-gathers of payloads.
        Replicas along dp_replicate are averaged as they are.

    Source: Guanhua Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training,
    arXiv:2306.10209.

    Args:
        gradients: Codec of gradients: bf16, int8, fp8 or int4, or `module:callable`, which is given `block` and returns
            a `composer3d.Codec`; default: they are exchanged in their own dtype.
        weights: Codec of gathered weights: int8 or fp8, or `module:callable`; default: they are gathered in their own
            dtype.
        block: Elements that share a scale.
        rounding: Of integers; stochastic rounding is unbiased, and its error up to twice as large.
        start_step: First step that is compressed; those before exchange everything as it is.
        min_numel: Units with fewer elements are exchanged as they are.
    """

    gradients: str | None = None
    weights: str | None = None
    block: int = Field(default=256, ge=8, le=1 << 20)
    rounding: Literal["nearest", "stochastic"] = "nearest"
    start_step: int = Field(default=0, ge=0)
    min_numel: int = Field(default=0, ge=0)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse what would compress nothing."""
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
        if self.rounding == "stochastic" and not {self.gradients, self.weights} & set(INTEGERS):
            raise PluginError(
                'rounding = "stochastic" is for integers, and none are on the wire',
                hint='write gradients = "int8", or leave rounding out',
            )
        if SHARDS not in context.owners:
            raise PluginError(
                f"no plugin of this manifest shards parameters over {SHARDS}, whose exchanges are what is compressed",
                hint="add a table of the family sharding that owns it: composer3d plugins lists them",
            )
        axes = (SHARDS, *context.layout.names(Role.SEQUENCE))
        if all(context.degrees[axis] == 1 for axis in axes):
            raise PluginError(
                f"{' and '.join(f'{axis} = 1' for axis in axes)}: no rank sends anything that could be compressed",
                hint=f"raise {SHARDS}, or remove this table",
            )
        if self.gradients is not None:
            context.claim("reduce_scatter", by=self)
        if self.weights is not None:
            context.claim("all_gather", by=self)
        context.state[self] = Wire(self, context)

    @hookimpl
    def composer3d_collectives(self, context: RunContext) -> Transform:
        """Replace the collectives of all units."""
        return Transform(
            name="compression",
            phase=Phase.COMMUNICATE,
            select=lambda model, context: context.units(None),
            apply=self._apply,
            uses=(SHARDS,),
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction | None:
        """Begin with the first step that is compressed; draw for stochastic rounding by step and rank."""
        if not self.start_step and self.rounding == "nearest":
            return None
        return StepAction(name="compression", point=StepPoint.BEGIN, run=self._begin)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        wire: Wire = context.state[self]
        for module in model.modules():
            unit = context.stash(Units).by_module.get(module)
            if unit is None:
                continue
            if self.gradients is not None:
                unit.set_reduce_scatter(wire.reduce_scatter)
            if self.weights is not None:
                unit.set_all_gather(wire.all_gather)
        return list(fqns)

    def _begin(self, state: StepState) -> None:
        state.context.state[self].begin(state.step)


class Wire:
    """Codecs of a run, and whether they are in use.

    Args:
        options: The plugin.
        context: Of the run.
    """

    def __init__(self, options: Compression, context: RunContext) -> None:
        import torch

        self._options, self._context = options, context
        self._coded = context.stash(CodedCollectives)
        self._is_begun = True
        is_random = options.rounding == "stochastic"
        self._generator = torch.Generator(device=context.device) if is_random else None
        self._codecs: dict[Travelling, Codec] = {}
        if options.gradients is not None:
            self._codecs["gradients"] = self._made(options.gradients)
        if options.weights is not None:
            self._codecs["weights"] = self._made(options.weights)
        self.reduce_scatter = CodedReduceScatter(
            codec=lambda numel: self._codec("gradients", numel),
            note=lambda group, length: self._note("gradients", group, length),
        )
        self.all_gather = CodedAllGather(
            codec=lambda numel: self._codec("weights", numel),
            note=lambda group, length: self._note("weights", group, length),
        )

    def begin(self, step: int) -> None:
        """Begin a step; plans and verify show what a run does once it compresses."""
        self._is_begun = step >= self._options.start_step or self._context.purpose != "run"
        if self._generator is not None:
            seed = self._context.manifest.train.seed
            self._generator.manual_seed(seed_of(seed, "compression", step, self._context.rank))

    def _made(self, name: str) -> Codec:
        if ":" not in name:
            return make_codec(name, block=self._options.block, generator=self._generator)
        made = resolve_reference(name, self._context.manifest.document.folder)(block=self._options.block)
        lacking = [
            each for each in ("num_bytes", "encode", "decode", "bound", "is_repeatable") if not hasattr(made, each)
        ]
        if lacking:
            raise PluginError(
                f'"{name}" returns {type(made).__name__}, which has no {" and no ".join(lacking)}',
                hint="composer3d.Codec lists what a codec has",
            )
        found: Codec = made
        return found

    def _codec(self, what: Travelling, numel: int) -> Codec | None:
        if self._coded.is_exact or not self._is_begun or numel < self._options.min_numel:
            return None
        return self._codecs[what]

    def _note(self, what: Travelling, group: Any, length: int) -> None:
        codec = self._codecs[what]
        found = self._coded.exchanges.setdefault(
            (what, group.group_name),
            CodedExchange(what=what, codec=codec, group=group, run=_run_of(what, codec, group)),
        )
        found.lengths.add(length)


def _run_of(what: Travelling, codec: Codec, group: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        return reduce_rows(x, codec, group) if what == "gradients" else gather_rows(x, codec, group)

    return run
