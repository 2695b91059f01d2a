"""Gradients of the global batch for losses of gradients, and a refusal of local gradients in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.step import gradients
from composer3d.step.losses.rank_weights import RankWeights
from composer3d.step.microbatches import tensors

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext
    from composer3d.step.losses.loss_graph import Reduction

__all__ = ["refuse_rank_gradients", "whole_gradients"]

_RANKS_OWN = (
    "torch.autograd.grad was asked for gradients of parameters, which are those of this rank's samples alone, and "
    "nothing nonlinear of them is the global batch's; write grads = run.grad(loss, create_graph=True), which returns "
    "the global batch's by FQN, or, where each rank's own are meant, as of a task of its own: "
    "with run.rank_gradients(): torch.autograd.grad(...)"
)


def whole_gradients(
    loss: Tensor,
    context: RunContext,
    *,
    create_graph: bool,
    retain_graph: bool | None,
    reduction: Reduction | None,
) -> dict[str, Tensor]:
    """Return the gradients of the global batch's loss by FQN, each whole and the same on every rank.

    What depends on them may be differentiated: the backward of the sum over ranks is the sum over ranks.

    Args:
        loss: This rank's, weighted as `backward` weighs it.
        context: Complete.
        create_graph: Whether the gradients are differentiated themselves.
        retain_graph: As of `torch.autograd.grad`.
        reduction: As of `backward`.

    Raises:
        StepError: Parameters that ranks along other axes than data-parallel ones hold.

    Memory: a whole gradient of every parameter. Collectives: one all-reduce an axis and parameter, and again in the
    backward; those of `RankWeights`.
    """
    import torch

    axes = [name for name in context.layout.names(Role.TENSOR, Role.EXPERT) if context.degrees[name] > 1]
    if axes:
        raise StepError(f"run.grad(...) returns whole gradients, and ranks along {axes[0]} hold shards of their own")
    weights, leaves = RankWeights.over(context), _leaves(context)
    weighted, num_ranks = weights.weigh(loss.reshape(()), reduction=reduction), weights.num_ranks * weights.num_copies
    found = torch.autograd.grad(
        weighted, list(leaves.values()), create_graph=create_graph, retain_graph=retain_graph, allow_unused=True
    )
    return {
        fqn: _mean_over_ranks(torch.zeros_like(leaf) if gradient is None else gradient, num_ranks, context)
        for (fqn, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def _mean_over_ranks(gradient: Tensor, num_ranks: int, context: RunContext) -> Tensor:
    import torch

    class WholeGradient(torch.autograd.Function):
        """Mean over ranks, whose adjoint is the mean over ranks."""

        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            added = given.detach().clone(memory_format=torch.contiguous_format)
            gradients.add_up(added, context=context)
            return added / num_ranks

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            return _mean_over_ranks(given[0], num_ranks, context)

    whole: Tensor = WholeGradient.apply(gradient) if num_ranks > 1 else gradient
    return whole


def refuse_rank_gradients(output: Any, context: RunContext, is_meant: Callable[[], bool]) -> None:
    """Make a backward of an output raise if it requests gradients of parameters.

    Args:
        output: Of the model's forward.
        context: Complete.
        is_meant: Whether the backward that runs is the composition's, or its gradients are meant to be a rank's.
    """

    def refuse(_: Tensor) -> None:
        if not is_meant() and any(torch_compat.is_captured(leaf) for leaf in _leaves(context).values()):
            raise StepError(_RANKS_OWN)

    for value in tensors(output):
        if value.requires_grad:
            value.register_hook(refuse)


def _leaves(context: RunContext) -> Mapping[str, Tensor]:
    """Return the tensors in graphs that stand for trained parameters, by FQN: gathered ones where they are sharded."""
    gathered = {
        id(each.sharded_param): each._unsharded_param
        for part in context.parts
        for module in part.module.modules()
        for group, _, _ in torch_compat.fsdp_groups(module)
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }
    gathered |= {id(leaf): leaf for leaf in gathered.values()}
    return {
        fqn: gathered.get(id(parameter), parameter)
        for fqn, parameter in context.named_parameters()
        if parameter.requires_grad
    }
