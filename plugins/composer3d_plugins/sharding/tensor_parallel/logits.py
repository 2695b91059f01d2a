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
from composer3d.propagation import Placed, Propagation, PropagationError, copy_mark, cut_of, is_in_place, mark, name_of

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
    return value if cut_of(value) is None else ShardedLogits._wrapped(value, classes)


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
    cut = cut_of(input)
    assert cut is not None, "it is called with sharded logits"
    dim = min(1, input.ndim - 1)
    if cut.placed.dim != dim:
        raise PropagationError(
            f"cross_entropy takes classes along dim {dim}, and the vocabulary is dim {cut.placed.dim}"
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
    """Cross-entropy of each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, classes: _Classes
    ) -> Tensor:
        """Return losses_BS of logits_BS(V/T) and targets_BS, 0 where they are ignored."""
        mesh, share = classes.sharded_over, logits.shape[-1]
        x = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        largest = x.amax(-1)
        with classes.span("all_reduce", group="largest logits", axis="tp", bytes=largest.nbytes):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        x = x - largest.unsqueeze(-1)
        valid = target != ignore_index
        index = target - mesh.get_local_rank() * share
        here = valid & (index >= 0) & (index < share)
        index = index.masked_fill(~here, 0)
        of_target = x.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        mean = x.sum(-1) / (share * mesh.size())
        x = x.exp_()
        sums = torch.stack([x.sum(-1), of_target, mean])
        with classes.span("all_reduce", group="sums of logits", axis="tp", bytes=sums.nbytes):
            dist.all_reduce(sums, group=mesh.get_group())
        exponentials, of_target, mean = sums
        losses = exponentials.log() - (1 - smoothing) * of_target - smoothing * mean
        ctx.save_for_backward(x.div_(exponentials.unsqueeze(-1)), index, here, valid)
        ctx.smoothing, ctx.num_classes, ctx.dtype = smoothing, share * mesh.size(), logits.dtype
        return losses.masked_fill(~valid, 0.0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the local logits_BS(V/T)."""
        probabilities, index, here, valid = ctx.saved_tensors
        result = probabilities - ctx.smoothing / ctx.num_classes if ctx.smoothing else probabilities.clone()
        result.scatter_add_(-1, index.unsqueeze(-1), here.to(result.dtype).mul(ctx.smoothing - 1).unsqueeze(-1))
        result.mul_(gradient.masked_fill(~valid, 0.0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None
