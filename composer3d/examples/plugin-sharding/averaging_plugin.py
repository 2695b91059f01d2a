"""Data parallelism: replicas whose gradients are averaged once a step, in one all-reduce a dtype."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from composer3d import Phase, RunContext, StepAction, StepState, Transform, averaging_action, hookimpl, plugin


# Owning an axis answers for it: `check` refuses a degree above 1 that nobody owns. Its role says what ranks have in
# common: dp_replicate is a BATCH axis, along which ranks read other samples. An axis of the plugin's own has a role
# too, axes=(Axis(name="island", role=Role.INDEPENDENT),) for models of their own, which verify compares separately.
@plugin(family="sharding", owns=("dp_replicate",))
class ReplicasAveraged:
    """Replicate the model over the ranks of dp_replicate, and average all gradients together.

    Memory: the gradients once more, while they travel. Collectives: one all-reduce a dtype and step.
    """

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        # What others do to a step is claimed, so that check finds plugins that cannot be combined.
        context.claim("gradients", by=self)

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        # `averages` tells the core over which axes the mean is taken: it multiplies the loss, so that the result is
        # the mean over all valid tokens, however many each rank has.
        axes = context.data_axes("dp_replicate")
        return Transform(
            name="replicas_averaged",
            phase=Phase.DATA,
            select=lambda model, context: [""],
            apply=self._apply,
            uses=axes,
            averages=axes,
        )

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        # After the last backward of a batch, before the loop reads gradients. A step may have several batches: averages
        # to which gradients of the next one are added are averaged again, and stay what they are.
        return averaging_action("replicas_averaged", self._average, context)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        return fqns

    def _average(self, state: StepState) -> None:
        group, degree = state.context.mesh.get_group("dp_replicate"), state.context.degrees["dp_replicate"]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for _, parameter in state.context.named_parameters():
            if parameter.requires_grad:
                # A rank without samples for a parameter still takes part, with zeros.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            together = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(together, group=group)
            together /= degree
            for gradient, part in zip(gradients, together.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
