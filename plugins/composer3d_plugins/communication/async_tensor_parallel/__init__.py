"""Asynchronous tensor parallelism: exchanges of a sharded sequence that run beside the products that need them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    ConvertedLayers,
    Decisions,
    Phase,
    PluginError,
    Role,
    RunContext,
    SequenceProjections,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    hookimpl,
    plugin,
    torch_compat,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AsyncTensorParallel"]

log = logging.getLogger(__name__)


@plugin(family="communication")
class AsyncTensorParallel:
    """Overlap the all-gathers and reduce-scatters of sequence parallelism with the matrix products beside them.

    decomposed: an exchange is one of `chunks` parts of this rank's positions after the other: while one travels,
        another one is multiplied. An activation that several projections read is gathered beside the first of them. In
        the backward, gradients of the input travel while that of the weight is computed. Gradients are those without
        this table, but for the order of sums. On CPU a chunk's sum over ranks is an all-to-all and a local sum, which
        sends half of what gloo's reduce-scatter does. Blocks around such projections are compiled around them.
    micro_pipelined: torch's compiler fuses an exchange and its products into one operator over symmetric memory, on
        GPUs of one machine, in blocks that are compiled. It says nothing where it fuses nothing: the pass is counted,
        and a run in whose first step it has fused nothing ends with an error. Caches of compiled graphs, which leave
        passes out, are off.
    What gathers before a module that several projections are in, because its code reads the length of the sequence,
    and what is no plain linear layer, keeps its exchange: the plan's rows name those that overlap.

    Memory: decomposed: two chunks of a gathered activation. micro_pipelined: a workspace of symmetric memory of the
        largest exchange.
    Collectives: decomposed: `chunks` in place of each exchange of a projection, of as many bytes together.
        micro_pipelined: none that are counted: they are in the fused operators.

    Source: Shibo Wang et al., Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
    Models, ASPLOS 2023; torch's pass is torch._inductor.fx_passes.micro_pipeline_tp.

    Args:
        method: auto takes micro_pipelined where there is symmetric memory, else decomposed.
        chunks: Of this rank's positions, decomposed alone; more hide more of an exchange, and each costs its latency;
            default: 2.
    """

    method: Literal["auto", "decomposed", "micro_pipelined"] = "auto"
    chunks: int | None = Field(default=None, ge=2, le=256, examples=[4])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse what would overlap nothing."""
        axis = _axis(context)
        if axis not in context.owners:
            raise PluginError(
                f"no plugin of this manifest shards over {axis}, whose exchanges are what overlaps",
                hint=f"add a table of the family sharding that owns {axis}: composer3d plugins lists them",
            )
        if context.degrees[axis] == 1:
            raise PluginError(
                f"{axis} = 1: no rank exchanges anything", hint=f"raise mesh.{axis}, or remove this table"
            )
        lacking = torch_compat.lacking_symmetric_memory(context.device, context.degrees[axis])
        if self.method == "micro_pipelined" and lacking is not None:
            raise PluginError(
                f'method = "micro_pipelined": {lacking}', hint='write method = "decomposed"', keys=("method",)
            )
        if self._is_decomposed(context):
            context.claim("sequence_projections", by=self)
        elif self.chunks is not None:
            raise PluginError(
                "chunks has no effect where the compiler divides exchanges itself",
                hint='leave chunks out, or write method = "decomposed"',
                keys=("chunks",),
            )

    @hookimpl
    def composer3d_collectives(self, context: RunContext) -> Transform:
        """Replace the projections, or have the compiler do so."""
        return Transform(
            name="async_tensor_parallel",
            phase=Phase.COMMUNICATE,
            select=self._select,
            apply=self._apply,
            uses=(_axis(context),),
            rows=self._rows,
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction | None:
        """Look after the first step whether the compiler has fused anything."""
        if self._is_decomposed(context):
            return None
        return StepAction(name="async_tensor_parallel", point=StepPoint.GRADIENTS_LOCAL, run=self._verify_fused)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Give the compiler its own pass and settings back."""
        held = context.state.pop(self, None)
        if held is not None:
            held[1]()

    def _is_decomposed(self, context: RunContext) -> bool:
        if self.method != "auto":
            return self.method == "decomposed"
        return torch_compat.lacking_symmetric_memory(context.device, context.degrees[_axis(context)]) is not None

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        planned, axis = context.stash(SequenceProjections).planned, _axis(context)
        if not planned:
            raise PluginError(
                "no linear layer gathers or sums a sequence that is sharded: there is nothing to overlap",
                hint=f"write sequence_parallel = true where {axis} is owned; where it stands, remove this table",
            )
        if not self._is_decomposed(context):
            return [fqn for fqn in context.fqns if fqn in planned]
        by = context.stash(ConvertedLayers).by_fqn
        converted = [fqn for fqn in context.fqns if fqn in planned and fqn in by]
        plain = [fqn for fqn in context.fqns if fqn in planned and fqn not in by]
        if not plain:
            names = " and ".join(sorted({by[fqn] for fqn in converted}))
            raise PluginError(
                f'all {len(converted)} linear layers that exchange the sequence, as "{converted[0]}", are converted by '
                f"{names}, whose products are no plain ones: there is nothing to overlap",
                hint=f"remove this table, or leave some of them out of {names}",
            )
        self._note_left(converted, context)
        return plain

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        planned: Mapping[str, str] = context.stash(SequenceProjections).planned
        if self._is_decomposed(context):
            planned = {fqn: kind for fqn, kind in planned.items() if fqn not in context.stash(ConvertedLayers).by_fqn}
        how = "" if self._is_decomposed(context) else "fused_"
        rows = {
            f"{how}{kind}": [fqn for fqn in context.fqns if planned.get(fqn) == kind] for kind in ("gathered", "summed")
        }
        return {label: fqns for label, fqns in rows.items() if fqns}

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        if not self._is_decomposed(context):
            return self._pipeline(model, fqns, context)
        # Late: the functions are of torch.
        from composer3d_plugins.communication.async_tensor_parallel.chunked_projections import (
            gathered_linear,
            summed_linear,
        )

        functions: Mapping[str, Any] = {"gathered": gathered_linear, "summed": summed_linear}
        made = {each.fqn: each for each in context.stash(SequenceProjections).made}
        changed = [fqn for fqn in fqns if fqn in made]
        if fqns and not changed:
            raise PluginError(
                f'"{fqns[0]}" is no plain linear layer any more, as all that exchange the sequence: nothing overlaps',
                hint="remove this table, or leave some projections as they are",
            )
        for fqn in changed:
            made[fqn].replace(partial(functions[made[fqn].kind], num_chunks=self.chunks or 2))
        left = [fqn for fqn in fqns if fqn not in made]
        self._note_left(left, context)
        return list(fqns)

    def _note_left(self, fqns: Sequence[str], context: RunContext) -> None:
        if fqns:
            noted = f"converted layers keep their exchange of {_axis(context)}: {', '.join(fqns)}"
            context.stash(Decisions).notes.append(noted)

    def _pipeline(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        if not any(module._compiled_call_impl is not None for module in model.modules()):
            raise PluginError(
                "the compiler fuses exchanges and products, and no block is compiled",
                hint='add a table of the family scheduling that compiles blocks, or write method = "decomposed"',
            )
        if self not in context.state:
            context.state[self] = torch_compat.micro_pipeline([context.mesh.get_group(_axis(context)).group_name])
        return list(fqns)

    def _verify_fused(self, state: StepState) -> None:
        """Raise where the compiler has compiled blocks and fused nothing in any of them."""
        context = state.context
        if self not in context.state or context.purpose == "plan":
            return
        fused = context.state[self][0]
        if not fused.gathered + fused.summed:
            raise PluginError(
                f"the compiler has fused none of {fused.found} exchanges of {_axis(context)} with their products: its "
                "pattern does not match what the blocks do",
                hint='write method = "decomposed"',
            )
        if not context.state[self][2:]:
            context.state[self] = (*context.state[self], True)
            log.info(
                "of %d exchanges in compiled graphs %d all-gathers and %d reduce-scatters are fused with products",
                fused.found,
                fused.gathered,
                fused.summed,
            )


def _axis(context: RunContext) -> str:
    """Return the axis of tensor parallelism; where there are several, one that a plugin owns."""
    names = context.layout.names(Role.TENSOR)
    return next((name for name in names if name in context.owners), names[0])
