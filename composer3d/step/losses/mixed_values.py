"""Losses of values that relate a rank's samples to one another, which the samples of other ranks take no part in.

A contrastive loss, `cross_entropy(x @ x.T, labels)`, and statistics of a batch, `(x - x.mean(0)).pow(2).mean()`, are
means over samples whose summands are not one device's: there each sample meets all. Ranks average them, as PyTorch's
DistributedDataParallel does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.mesh import Role
from composer3d.observation.call_sites import caller
from composer3d.step.losses.batch_parts import BatchParts, uneven_numbers
from composer3d.step.losses.detached_statistics import DetachedStatistics
from composer3d.step.losses.loss_graph import bent_at, terms_of
from composer3d.step.losses.sample_mixing import (
    ELEMENTWISE,
    LINEAR,
    REDUCTIONS,
    base,
    dims_of,
    is_exchanged,
    is_parameter,
    is_weight,
    operands_of,
)
from composer3d.step.losses.sample_parts import sample_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from composer3d.context import RunContext
    from composer3d.step.losses.rank_weights import RankLoss

__all__ = ["MixedLosses", "relation"]

log = logging.getLogger(__name__)

_RELATED = (
    "%s: the loss relates samples of a batch to one another (%s), and each of the %d data-parallel ranks relates its "
    "own alone: the average over ranks, which is trained on, is another loss than one device's over all samples; where "
    "that is meant, write %s, and nothing is said; for one device's, gather the samples of all ranks in the loss "
    "(torch.distributed.nn.functional.all_gather)"
)
_OTHER_PARTS = (
    "%s: the loss adds up means over %d parts of a rank's samples, of different numbers of targets (%s): one device "
    "has parts of other samples, and another loss than the means over the same part of all ranks, which are trained "
    "on; where these are meant, write %s, and nothing is said; the sum over all parts, given backward or returned from "
    "loss_fn as (sum, count) with the number of its targets, is one device's whatever the parts"
)
_OTHER_BACKWARDS = (
    "%s: a step's backwards are of %d parts of a batch, means over different numbers of targets (%s): one device has "
    "parts of other samples, and another loss than the means over the same part of all ranks, which are trained on; "
    "where these are meant, write %s, and nothing is said; inside of `with run.accumulate(n):`, each part's sum given "
    "backward as (sum, count) with the number of its targets is one device's whatever the parts"
)
_NUM_LOSSES = 8  # that are looked at: a loop may have several in turn
_NUM_BATCHES = 2  # whose parts are compared
_NUM_NODES = 2000
_SHOWN = 4
_RUN = "a run of a manifest"
_LINEAR = (*LINEAR, "Cat", "Mean", "Stack", "Sum", "_DDPSink")
_ORDERS = frozenset("Cummax Cummin Cumprod Cumsum Kthvalue Logcumsumexp Median Sort Topk".split())


class MixedLosses:
    """Logs a warning, once, of a loss that relates samples of a rank, in the first backwards of a run.

    Batch normalisation is not reported, whose statistics are a rank's in data parallelism by common use.

    Attributes:
        detached: Follows values without a gradient, which are in no graph.

    Memory: none. Collectives: none.

    Args:
        context: Of the run; None: nothing is reported.
    """

    def __init__(self, context: RunContext | None = None) -> None:
        self.detached = DetachedStatistics(context)
        self._num_left, self._is_told, self._is_first, self._num_batches = 0, False, False, _NUM_BATCHES
        if context is not None and context.purpose == "run" and (num_ranks := context.layout.degree(Role.BATCH)) > 1:
            self._num_left, self._num_ranks = _NUM_LOSSES, num_ranks
            names = context.layout.names(Role.BATCH, Role.SEQUENCE, Role.TENSOR)
            self._is_first = not any(context.coordinates[axis] for axis in names)

    def look(
        self,
        loss: Any,
        num_samples: int,
        *,
        reduction: str | None,
        loss_fn: Callable[..., Any] | Literal["the loop", "the model"] = "the loop",
        parts: BatchParts | None = None,
        ranks: Callable[[], Sequence[RankLoss]] = tuple,
    ) -> None:
        """Look at a loss.

        Args:
            loss: Scalar with a graph; others are left alone.
            num_samples: Number of samples in its forward; 0 if unknown.
            reduction: As it is stated, so that nothing is said; None where its graph tells.
            loss_fn: What has computed it.
            parts: Forwards of parts of one batch.
            ranks: Returns the losses of all ranks, if they were weighed.
        """
        node = getattr(loss, "grad_fn", None)
        if reduction or node is None or torch_compat.active_fake_mode() is not None:
            return
        if parts is not None:
            self._look_at_parts(parts, ranks)
        if not self._num_left:
            return
        self._num_left -= 1
        # A function of a mean is given that of all ranks, so that what relates samples stands before it.
        bent = [(term, bent_at(term)) for term in terms_of(loss)]
        nodes = (
            [term if each is None else each.mean for term, each in bent] if any(each for _, each in bent) else [node]
        )
        seen = next((found for each in nodes if (found := relation(each, num_samples))), self.detached.seen)
        if seen is not None:
            self.report(seen, loss_fn=loss_fn)
        elif (own := sample_parts(loss, num_samples, 0 if parts is None else parts.num)) is not None:
            numbers: Sequence[float] = own.divisors if own.is_uneven else ()
            if self._is_first and not numbers:  # the device is waited for where something would be logged
                numbers = uneven_numbers([ranks()])
            self._log_parts(_OTHER_PARTS, own.num, numbers, loss_fn)

    def _look_at_parts(self, parts: BatchParts, ranks: Callable[[], Sequence[RankLoss]]) -> None:
        """Look at the parts of a batch whose losses have a backward each."""
        if self._is_first and not self._is_told and self._num_batches and (found := parts.complete(ranks)):
            self._num_batches -= 1
            self._log_parts(_OTHER_BACKWARDS, len(found), uneven_numbers(found), "the loop")

    def report(self, seen: str, *, loss_fn: Callable[..., Any] | Literal["the loop", "the model"]) -> None:
        """Log what was seen, once a run.

        Args:
            seen: What relates samples.
            loss_fn: As of `look`.
        """
        self._log(_RELATED, loss_fn, seen, self._num_ranks)

    def _log_parts(
        self,
        text: str,
        num: int,
        numbers: Sequence[float],
        loss_fn: Callable[..., Any] | Literal["the loop", "the model"],
    ) -> None:
        if numbers:
            shown = [f"{each:g}" for each in numbers[:_SHOWN]]
            self._log(text, loss_fn, num, ", ".join(shown) + ", ..." * (len(numbers) > _SHOWN))

    def _log(self, text: str, loss_fn: Callable[..., Any] | Literal["the loop", "the model"], *shown: Any) -> None:
        is_told, self._is_told, self._num_left = self._is_told, True, 0
        if self._is_first and not is_told:
            place = _place(loss_fn)
            stated = 'compose(loss_reduction="mean")'
            if loss_fn == "the loop":
                stated = 'run.backward(loss, reduction="mean")'
            elif place == _RUN:
                stated = '[train] loss = { use = "module:callable", reduction = "mean" } with a loss of your own'
            log.warning(text, place, *shown, stated)


def _place(loss_fn: Callable[..., Any] | str) -> str:
    if isinstance(loss_fn, str):
        return (caller(())[1] if loss_fn == "the loop" else "") or loss_fn
    function = getattr(loss_fn, "__func__", loss_fn)
    if str(getattr(function, "__module__", "")).startswith("composer3d"):
        return _RUN  # whose loss wraps what the manifest names
    code = getattr(function, "__code__", None) or getattr(getattr(type(loss_fn), "forward", None), "__code__", None)
    return "loss_fn" if code is None else f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def relation(node: Any, num_samples: int) -> str | None:
    """Return what relates samples between the last weights of a model and its loss; None if nothing is seen.

    Args:
        node: Of the loss.
        num_samples: Of the forward, in the first dim; 0 if unknown.
    """
    if num_samples == 1:
        return None
    pending: list[tuple[Any, bool]] = [(node, False)]
    seen: set[tuple[Any, bool]] = set()
    while pending and len(seen) < _NUM_NODES:
        each, is_bent = pending.pop()
        if each is None or (each, is_bent) in seen or base(each) == "AccumulateGrad":
            continue
        seen.add((each, is_bent))
        name, operands = base(each), operands_of(each)
        weights = [operand for operand in operands if is_weight(operand)]
        others = [operand for operand in operands if operand not in weights]
        if weights and name not in ELEMENTWISE:
            continue  # a layer of the model
        if (found := _related(each, name, others, is_bent, num_samples)) is not None:
            return found
        is_linear = name in _LINEAR or (name in ("Mul", "Div") and len(others) == 1)
        pending += [(operand, is_bent or not is_linear) for operand in others]
    return None


def _related(node: Any, name: str, operands: list[Any], is_bent: bool, num_samples: int) -> str | None:
    if name in ("Cdist", "Pdist"):
        sizes = (torch_compat.saved_tensor(node, "x1" if name == "Cdist" else "self"),)
        return "distances between samples" if sizes[0] is not None and sizes[0].dim() == 2 else None
    if name in ("Mm", "Bmm") and operands and _is_product_of_samples(node, operands, num_samples):
        return "a product of values of samples with one another"
    if name in ELEMENTWISE and len(operands) == 2 and {_inserted(each) for each in operands} in ({0, 1}, {0, 2}):
        return "values of samples beside those of each other one"
    if name in _ORDERS and _is_along_samples(node, operands, num_samples):
        return f"{name} over the samples of a batch"
    if name in ELEMENTWISE and len(operands) == 2 and any(is_exchanged(each, num_samples) for each in operands):
        return "values of samples beside those of others"
    if name == "Roll" and 0 in tuple(getattr(node, "_saved_dims", ())):
        return "values of samples beside those of others"
    if name in REDUCTIONS and (is_bent or name not in ("Mean", "Sum")):
        dims = dims_of(node)
        if dims is not None and 0 in dims[0] and dims[1] > 1 and num_samples in (0, dims[1]):
            return f"{name} over the samples of a batch, and what is computed from it"
    return None


def _is_along_samples(node: Any, operands: list[Any], num_samples: int) -> bool:
    """Return whether an order is that of samples, or of all elements of all samples."""
    if (found := dims_of(node)) is None:
        sizes = list(torch_compat.node_shape(node) or ())
        dim = getattr(node, "_saved_dim", 0)
        found = ({(dim - 2**64 if dim >= 2**63 else dim) % len(sizes)}, sizes[0]) if sizes else None
    if found is None or 0 not in found[0] or found[1] <= 1:
        return False
    viewed: tuple[int, ...] = getattr(operands[0], "_saved_self_sym_sizes", ()) if operands else ()
    is_flat = base(operands[0]) in ("View", "UnsafeView", "Reshape", "MaskedSelect", "Index") if operands else False
    if is_flat and len(viewed) > 1 and viewed[0] == num_samples:
        return True
    # Of one dim, it is of samples, or of their tokens.
    is_row = len(torch_compat.node_shape(node) or ()) == 1
    return not num_samples or found[1] == num_samples or (is_row and found[1] % num_samples == 0)


def _is_product_of_samples(node: Any, operands: list[Any], num_samples: int) -> bool:
    """Return whether a product of matrices has samples in both, by rows, or adds up over them.

    Of batches of products, as attention has, the first dim is that of samples, unless it is 1.
    """
    sizes = [torch_compat.saved_tensor(node, key) for key in ("self", "mat2")]
    first, second = (None if each is None else tuple(each.shape) for each in sizes)
    if base(node) == "Mm":  # saves one operand's tensor where the other takes no gradient, and all sizes
        first = tuple(getattr(node, "_saved_self_sym_sizes", ())) or first
        second = tuple(getattr(node, "_saved_mat2_sym_sizes", ())) or second
    if first is None or second is None or (len(first) == 3 and first[0] != 1):
        return False
    rows, inner, columns = first[-2], first[-1], second[-1]
    if len(operands) < 2:  # with detached values of as many samples
        own = getattr(sizes[1], "_base", None)
        return rows == columns == num_samples and not is_parameter(sizes[1] if own is None else own)
    return not num_samples or inner == num_samples or rows == columns == num_samples


def _inserted(node: Any) -> int | None:
    """Return the dim that was inserted last into a tensor, through what changes its elements one by one."""
    for _ in range(8):
        if node is None or base(node) == "Unsqueeze":
            break
        operands = operands_of(node)
        if base(node) not in (*LINEAR, *ELEMENTWISE, "Abs", "Exp", "Log", "Sqrt") or not operands:
            return None
        node = operands[0]
    return None if node is None or base(node) != "Unsqueeze" else int(node._saved_dim)
