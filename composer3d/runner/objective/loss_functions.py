"""Losses that `[train] loss` names, as sums over their counted targets.

Shapes: N targets of a micro-batch, V classes or tokens of the vocabulary, X any dims before them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import LossError, ReferenceFailure
from composer3d.manifest import resolve_reference
from composer3d.processes import running
from composer3d.runner.objective.loss_table import ELEMENTWISE, LossTable
from composer3d.step import divisor_of_mean

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Loss

__all__ = ["RunLoss", "count_targets", "logits_of", "make_loss", "returned_loss", "token_loss"]


@dataclass(frozen=True, kw_only=True)
class RunLoss:
    """A loss and its divisor.

    Args:
        function: Called with the model's output and the targets; returns a `Loss`, a sum and its count, or a scalar.
        count: Counts what the loss of targets is summed over.
        ignored: The target that carries no loss.
    """

    function: Callable[[Any, Any], Any]
    count: Callable[[Any], int]
    ignored: int


def make_loss(table: LossTable, folder: Path) -> RunLoss:
    """Build the loss that a manifest names.

    Args:
        table: `[train] loss`; `model` is not made here.
        folder: Of the manifest, from which modules are importable.

    Raises:
        ReferenceFailure: `module:callable` leads nowhere, or cannot be called with its arguments.
    """
    function: Callable[[Any, Any], Any]
    if table.use == "cross_entropy":
        function = functools.partial(
            token_loss,
            ignore_index=table.ignored,
            label_smoothing=table.label_smoothing or 0.0,
            class_dim=-1 if table.class_dim is None else table.class_dim,
        )
    elif table.use in ELEMENTWISE:
        function = functools.partial(_elementwise, kind=table.use, options=table.args)
    elif table.use == "model":
        function = returned_loss
    else:
        function = _imported(table, folder)
    if table.reduction is not None:
        function = functools.partial(_reduced, function=function, reduction=table.reduction)
    return RunLoss(
        function=function, count=functools.partial(count_targets, ignored=table.ignored), ignored=table.ignored
    )


def _imported(table: LossTable, folder: Path) -> Callable[[Any, Any], Any]:
    found = resolve_reference(table.use, folder)
    if not callable(found):
        raise ReferenceFailure(f'"{table.use}" cannot be called: it is of type {type(found).__name__}')
    try:
        if inspect.isclass(found):
            with running("called", table.use):
                found = found(**table.args)
        else:
            inspect.signature(found).bind(None, None, **table.args)
            found = functools.partial(found, **table.args) if table.args else found
    except TypeError as error:
        raise ReferenceFailure(
            f'"{table.use}" cannot be a loss: {error}; it is called with the model\'s output and the targets'
        ) from None
    except ValueError:  # a builtin without a signature: the call itself tells
        pass
    function: Callable[[Any, Any], Any] = found
    return function


def _reduced(output: Any, target: Any, *, function: Callable[[Any, Any], Any], reduction: str) -> Any:
    """Return a scalar loss as one whose last operation shows it to be the stated sum or mean."""
    import torch

    value = function(output, target)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise LossError(
            f'[train] loss has reduction = "{reduction}", which says what a scalar is, and the loss returned '
            f"{type(value).__name__}; remove it"
        )
    if reduction == "mean" and divisor_of_mean(value) is not None:
        return value.reshape(()) / 1  # a mean, whose graph says over what
    return value.reshape(1).sum() if reduction == "sum" else value.reshape(1).mean()


def count_targets(targets: Any, *, ignored: int) -> int:
    """Count what the loss of targets is summed over, where the loss does not say it itself.

    Integers that are not `ignored`, or the elements of a floating-point tensor; of several tensors, the samples.
    """
    import torch

    if isinstance(targets, Mapping) and isinstance(targets.get("labels"), torch.Tensor):
        targets = targets["labels"]
    if isinstance(targets, torch.Tensor):
        if targets.is_floating_point() or targets.is_complex():
            return targets.numel()
        return int((targets != ignored).sum())
    leaves = [leaf for leaf in torch_compat.tree_leaves(targets) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return leaves[0].shape[0] if leaves else 1


def token_loss(
    output: Any, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, class_dim: int = -1
) -> Loss:
    """Return the cross entropy of logits, summed in float32 over the targets that are not ignored.

    Args:
        output: Logits `[..., vocabulary]`, or a dict, named tuple or other registered tree that has them as `logits`,
            and may have a scalar as `auxiliary`, which joins the objective as its mean over micro-batches.
        target: `[...]`, tokens or classes.
        ignore_index: The target that carries no loss.
        label_smoothing: Fraction of the target's probability that is spread over all classes.
        class_dim: The dim of the logits that holds the classes; 1 for images `[batch, class, row, column]`.

    Raises:
        LossError: The logits are inside an object that torch cannot look into, there are none, or targets do not fit.
    """
    import torch

    from composer3d import Loss

    logits_XV = logits_of(output)
    if logits_XV is not output and not any(leaf is logits_XV for leaf in torch_compat.tree_leaves(output)):
        # FSDP2 attaches its backward to the tensors that it finds in a module's output; with none it silently trains
        # nothing.
        raise LossError(
            f"the model returns its logits inside a {type(output).__name__}, which torch cannot look into, so data "
            "parallelism would find no gradients; return the logits, a NamedTuple or a dict-like output of transformers"
        )
    if not isinstance(logits_XV, torch.Tensor) or logits_XV.dim() < 2:
        is_tensor = isinstance(logits_XV, torch.Tensor)
        kind = f"a tensor of shape {list(logits_XV.shape)}" if is_tensor else type(logits_XV).__name__
        raise LossError(
            f"the model returns {kind}, and the loss of a run takes logits [batch, sequence, vocabulary]; return "
            "those, or something that has them as `logits`, a dict for example; for another loss write [train] loss, "
            'for example "mse" or "module:callable"'
        )
    _refuse_targets(target)
    if class_dim != -1:
        logits_XV = logits_XV.movedim(class_dim, -1)
    logits_NV = logits_XV.flatten(0, -2)
    if target.is_floating_point() or logits_NV.shape[0] != target.numel():
        shape, is_second = list(logits_XV.shape), class_dim == -1 and _is_classes_second(logits_XV, target)
        more = '; where dim 1 holds the classes, write train.loss = { use = "cross_entropy", class_dim = 1 }'
        raise LossError(
            f"logits of shape {shape} (classes last) do not fit {target.dtype} targets of shape "
            f"{list(target.shape)}; cross_entropy takes one integer for each row of logits{more if is_second else ''}"
        )
    total = _summed_entropy(logits_NV, target.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing)
    return Loss(sum=total, count=(target != ignore_index).sum(), auxiliary=_auxiliary_of(output))


def _summed_entropy(logits_NV: Tensor, target_N: Tensor, *, ignore_index: int, label_smoothing: float) -> Tensor:
    import torch.nn.functional as F

    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    try:
        return F.cross_entropy(_widened(logits_NV), target_N, reduction="sum", **options)
    except IndexError as error:  # of the CPU; a GPU's assertion comes later, and ends the process
        classes, (least, most) = logits_NV.shape[1], target_N[target_N != ignore_index].aminmax()
        raise LossError(
            f"the model returns {classes} classes, 0 to {classes - 1}, and targets are {least} to {most}; count "
            f"classes from 0, give the model more of them, or mark targets without loss as {ignore_index}"
        ) from error


def _auxiliary_of(output: Any) -> Tensor | None:
    """Return the `auxiliary` of an output that has one beside its logits, as `Loss.auxiliary` takes it."""
    found = output.get("auxiliary") if isinstance(output, Mapping) else getattr(output, "auxiliary", None)
    return found if logits_of(output) is not output else None


def _elementwise(output: Any, target: Any, *, kind: str, options: Mapping[str, Any]) -> Loss:
    """Return a loss of every element, summed in float32, and the number of elements.

    Raises:
        LossError: Output and target are no tensors of one shape, which torch would broadcast.
    """
    import torch
    import torch.nn.functional as F

    from composer3d import Loss

    value = logits_of(output)
    _refuse_targets(target)
    if not isinstance(value, torch.Tensor):
        raise LossError(
            f'the model returns {type(value).__name__}, and loss = "{kind}" takes a tensor; return one, or write '
            'loss = "module:callable"'
        )
    if value.shape != target.shape:
        raise LossError(
            f'loss = "{kind}" compares element by element: the model returns {list(value.shape)}, and the targets are '
            f"{list(target.shape)}; give both one shape"
        )
    value = _widened(value)
    total = getattr(F, ELEMENTWISE[kind])(value, target.to(value.dtype), reduction="sum", **options)
    return Loss(sum=total, count=target.numel())


def _widened(value: Tensor) -> Tensor:
    """Return a tensor of at least float32: narrower sums lose terms."""
    import torch

    return value if value.dtype is torch.float64 else value.float()


def logits_of(output: Any) -> Any:
    """Return the `logits` that an output has as an attribute or under that key, else the output."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def _is_classes_second(logits: Tensor, target: Tensor) -> bool:
    return logits.shape[:1] + logits.shape[2:] == target.shape


def _refuse_targets(target: Any) -> None:
    import torch

    if not isinstance(target, torch.Tensor):
        what = "no targets" if target is None else f"targets of type {type(target).__name__}"
        raise LossError(
            f'the data give {what}, and this loss takes one tensor; write loss = "module:callable", or give the data '
            'a target: (input, target), or a key "targets"'
        )


def returned_loss(output: Any, target: Any) -> Any:
    """Return the loss that a model computes itself: `loss` of its output, or the output's only scalar.

    Raises:
        LossError: There is none, or there are several.
    """
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is not None:
        return found
    scalars = list(_scalars(output))
    if len(scalars) != 1:
        raise LossError(
            f'the model returns {type(output).__name__} with {len(scalars)} scalars, and with loss = "model" one is '
            "its loss; name it `loss`, or write another [train] loss"
        )
    return scalars[0]


def _scalars(output: Any) -> Iterator[Tensor]:
    import torch

    for leaf in torch_compat.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.is_floating_point():
            yield leaf
