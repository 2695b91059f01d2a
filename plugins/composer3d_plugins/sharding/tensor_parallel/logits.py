"""Logits sharded along the vocabulary, and their cross-entropy: no rank ever holds all logits of a token.

Shapes: B batch, S sequence, V vocabulary, T degree of tp; a rank holds logits_BS(V/T) and targets_BS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composer3d import TransformError, torch_compat
from composer3d.propagation import Placed, Propagation, PropagationError, copy_mark, is_in_place, mark, name_of, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardedLogits"]

Span = Callable[..., AbstractContextManager[None]]

# What hooks and graphs ask of a tensor; the answers are this rank's.
OWN = frozenset("register_hook requires_grad requires_grad_ grad_fn is_leaf retain_grad retains_grad __hash__".split())


class _Classes(Propagation):
    """Propagates sharded logits.

    Args:
        mesh: Of one dim, tp.
        span: Opens a span around each collective.
    """

    def __init__(self, mesh: DeviceMesh, span: Span) -> None:
        super().__init__(mesh.size(), "loss_parallel", mesh=mesh)
        self.sharded_over, self.span = mesh, span


class ShardedLogits(Tensor):
    """Local logits_BS(V/T). Code sees the global sizes, as in a region; cross-entropy is over the whole vocabulary.

    Whatever else needs the logits of other ranks, such as a softmax, is an error.
    """

    composer3d_classes: _Classes

    @classmethod
    def of(cls, logits: Any, mesh: DeviceMesh, span: Span) -> ShardedLogits:
        """Return a DTensor's local shard as sharded logits; their loss opens spans around its collectives."""
        local: Tensor = torch_compat.unviewed(logits.to_local())
        placed = Placed(dim=local.ndim - 1, parts=(logits.shape[-1],))
        return cls._wrapped(mark(local, placed=placed, degree=mesh.size()), _Classes(mesh, span))

    @classmethod
    def _wrapped(cls, local: Tensor, classes: _Classes) -> ShardedLogits:
        with torch_compat.without_torch_functions():
            result: ShardedLogits = copy_mark(local, local.as_subclass(cls))
        result.composer3d_classes = classes
        return result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function on the local shard."""
        options = dict(kwargs or {})
        leaves = torch_compat.tree_leaves([list(args), options])
        classes = next(leaf for leaf in leaves if isinstance(leaf, cls)).composer3d_classes
        with torch_compat.without_torch_functions():
            if name_of(func) in OWN:
                return func(*args, **options)
            if name_of(func) == "_base":
                # FSDP2 warns of views, because hooks are lost where they are changed in place; that is refused below.
                return None
            args, options = torch_compat.tree_map(_plain, [list(args), options])
            try:
                if func is F.cross_entropy:
                    return _cross_entropy(classes, *args, **options)
                if is_in_place(name_of(func)):
                    raise PropagationError(f'"loss_parallel": {name_of(func)} changes sharded logits in place')
                result = classes.run(func, args, options)
            except PropagationError as error:
                raise TransformError(
                    f"{error}; of the losses only cross_entropy works on sharded logits; leave out loss_parallel"
                ) from error
        return torch_compat.tree_map(functools.partial(_rewrapped, classes=classes), result)


def _plain(value: Any) -> Any:
    return copy_mark(value, value.as_subclass(Tensor)) if isinstance(value, ShardedLogits) else value


def _rewrapped(value: Any, classes: _Classes) -> Any:
    return value if spec_of(value) is None else ShardedLogits._wrapped(value, classes)


def _cross_entropy(
    classes: _Classes,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss as `F.cross_entropy` does, whose arguments these are; of ..., with classes along dim 1."""
    spec = spec_of(input)
    assert spec is not None, "it is called with sharded logits"
    dim = min(1, input.ndim - 1)
    if spec.placed.dim != dim:
        raise PropagationError(
            f"cross_entropy takes classes along dim {dim}, and the vocabulary is dim {spec.placed.dim}"
        )
    if target.is_floating_point() or (weight is not None and label_smoothing):
        what = "class weights and label smoothing together" if weight is not None else "probabilities as targets"
        raise PropagationError(f"cross_entropy with {what} needs whole logits")
    if size_average is not None or reduce is not None:
        raise PropagationError("cross_entropy knows size_average and reduce no more; use reduction")
    losses = _Losses.apply(input.movedim(dim, -1), target, ignore_index, label_smoothing, classes)
    weights = (target != ignore_index).to(losses.dtype)
    if weight is not None:
        weights = weights * weight[target.clamp(min=0)]
        losses = losses * weights
    if reduction == "none":
        return losses
    total: Tensor = losses.sum()
    return total if reduction == "sum" else total / weights.sum()


class _Losses(torch.autograd.Function):
    """Cross-entropy of each of N tokens in any dims, of which a rank has C of the vocabulary's V = C T classes."""

    @staticmethod
    def forward(
        ctx: Any, logits_NC: Tensor, target_N: Tensor, ignore_index: int, smoothing: float, classes: _Classes
    ) -> Tensor:
        """Return losses_N, 0 where targets are ignored."""
        mesh, share = classes.sharded_over, logits_NC.shape[-1]
        x_NC = logits_NC.float() if logits_NC.dtype in (torch.bfloat16, torch.float16) else logits_NC
        largest_N = x_NC.amax(-1)
        with classes.span("all_reduce", group="largest logits", axis="tp", bytes=largest_N.nbytes):
            dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=mesh.get_group())
        x_NC = x_NC - largest_N.unsqueeze(-1)
        valid_N = target_N != ignore_index
        index_N = target_N - mesh.get_local_rank() * share
        here_N = valid_N & (index_N >= 0) & (index_N < share)
        index_N = index_N.masked_fill(~here_N, 0)
        of_target_N = x_NC.gather(-1, index_N.unsqueeze(-1)).squeeze(-1).masked_fill(~here_N, 0.0)
        mean_N = x_NC.sum(-1) / (share * mesh.size())
        x_NC = x_NC.exp_()
        sums_3N = torch.stack([x_NC.sum(-1), of_target_N, mean_N])
        with classes.span("all_reduce", group="sums of logits", axis="tp", bytes=sums_3N.nbytes):
            dist.all_reduce(sums_3N, group=mesh.get_group())
        exponentials_N, of_target_N, mean_N = sums_3N
        losses_N = exponentials_N.log() - (1 - smoothing) * of_target_N - smoothing * mean_N
        ctx.save_for_backward(x_NC.div_(exponentials_N.unsqueeze(-1)), index_N, here_N, valid_N)
        ctx.smoothing, ctx.num_classes, ctx.dtype = smoothing, share * mesh.size(), logits_NC.dtype
        return losses_N.masked_fill(~valid_N, 0.0).to(logits_NC.dtype)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of logits_NC."""
        probabilities_NC, index_N, here_N, valid_N = ctx.saved_tensors
        result_NC = probabilities_NC - ctx.smoothing / ctx.num_classes if ctx.smoothing else probabilities_NC.clone()
        of_target_N = here_N.to(result_NC.dtype).mul(ctx.smoothing - 1)
        result_NC.scatter_add_(-1, index_N.unsqueeze(-1), of_target_N.unsqueeze(-1))
        result_NC.mul_(gradient_N.masked_fill(~valid_N, 0.0).unsqueeze(-1))
        return result_NC.to(ctx.dtype), None, None, None, None
