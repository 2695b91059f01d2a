"""Mixed precision: narrow compute, wide weights and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from composer3d import Dtypes, Phase, Role, RunContext, Transform, hookimpl, plugin

if TYPE_CHECKING:
    import torch
    from torch import nn

Name = Literal["bfloat16", "float32"]


@plugin(family="precision")
class Mixed:
    """Compute in bfloat16 on weights that stay float32 in the optimizer, and reduce gradients in float32.

    The data-parallel plugin applies it to its units. Without one, the policy is applied here, over a mesh of one rank,
    so that it means the same thing in every layout.
    Memory: float32 shards, and the unit at work in param_dtype.
    Collectives: none of its own; all-gathers carry param_dtype, reductions reduce_dtype.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740.

    Args:
        param_dtype: Of parameters and activations in forward and backward.
        reduce_dtype: Of gradients on the wire.
        output_dtype: Of the model's outputs; default: as they come.
    """

    param_dtype: Name = "bfloat16"
    reduce_dtype: Name = "float32"
    output_dtype: Name | None = None

    @hookimpl
    def composer3d_dtypes(self, context: RunContext, fqn: str) -> Dtypes:
        """Give every unit the same parameter and reduction dtypes; only the root's output is cast."""
        return Dtypes(
            param=_dtype(self.param_dtype),
            reduce=_dtype(self.reduce_dtype),
            output=_dtype(self.output_dtype) if self.output_dtype is not None and not fqn else None,
        )

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform | None:
        """Apply the policy over a mesh of one rank where no data-parallel plugin would."""
        if any(axis in context.owners for axis in context.layout.names(Role.BATCH)):
            return None
        return Transform(
            name="mixed",
            phase=Phase.DATA,
            select=lambda model, context: context.units(None),
            apply=self._apply,
        )

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for fqn in sorted(fqns, key=lambda name: -len(name.split(".")) if name else 1):
            dtypes = context.dtypes(fqn)
            fully_shard(
                model.get_submodule(fqn),
                mesh=context.mesh["dp_shard"],
                reshard_after_forward=False,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=dtypes.param, reduce_dtype=dtypes.reduce, output_dtype=dtypes.output
                ),
            )
        return list(fqns)


def _dtype(name: Name) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
