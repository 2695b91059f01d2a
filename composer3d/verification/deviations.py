"""Deviations of a composition's tensors from the reference, and explanations of those beyond the tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from composer3d import all_gather_json
from composer3d.mesh import Role
from composer3d.step import full, gather_full, local
from composer3d.torch_compat import without_torch_functions
from composer3d.verification.comparison import Limits, difference, fit, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["Deviation", "deviations_of", "gathered", "multiple", "narrowed"]

_MAX_EXAMINED = 24
# Relative.
_CLOSE = 1e-9
# Elements, of which not all have few digits by chance; relative to the largest of all, what may be noise of float32.
_MANY, _NOISE = 8, 1e-5


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Deviation of one tensor of this rank's composition from the reference, and its explanations.

    Args:
        rel: max|d| / max|reference|; infinite where only one side has it.
        factor: Its factor to the reference; None where it is no multiple.
        missing: Whether only the reference has a value.
        summed: By axis, the relative difference after an all-reduce of the ranks' values by sum.
        averaged: The same by mean.
        mixed: The same, with each element taken as it is or summed, whichever is right.
        turned: Axes along which the shards are right, and in another order.
        narrow: Narrower dtype that represents every element exactly; empty where none does.
        pieces: Ranks whose shards alone are wrong; empty where all are, or without shards.
        rows: First and last wrong index along the first dim, where a run of them is wrong and the shards of `pieces`
            have others that are right; None otherwise.
        is_extra: Whether only this rank has a value.
        elements: Known change of the right elements, each or in their order; empty where none fits.
        other: FQN of the parameter whose right values it has; empty where there is none.
    """

    rel: float
    factor: float | None = None
    missing: bool = False
    summed: Mapping[str, float] = field(default_factory=dict)
    averaged: Mapping[str, float] = field(default_factory=dict)
    mixed: Mapping[str, float] = field(default_factory=dict)
    turned: tuple[str, ...] = ()
    narrow: str = ""
    pieces: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    is_extra: bool = False
    elements: str = ""
    other: str = ""


def gathered(run: Composition, named: Any) -> dict[str, Tensor]:
    """Return full tensors on the CPU, as the model orders them. Collectives: those of `gather_full`."""
    items = named.items() if isinstance(named, Mapping) else named
    # In order before they are passed on: only the stages that hold a parameter know how it is kept.
    own = {fqn: run.context.in_model_order(fqn, full(tensor)) for fqn, tensor in items}
    return {fqn: tensor.cpu() for fqn, tensor in gather_full(own).items()}


def deviations_of(
    run: Composition, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], limits: Limits, kind: str
) -> dict[str, Deviation]:
    """Compare every tensor; examine those beyond the tolerance on some rank, on all ranks together."""
    scale = scale_of(reference.values())
    result: dict[str, Deviation] = {}
    for fqn in sorted({*actual, *reference}):
        if fqn in actual and fqn in reference:
            result[fqn] = Deviation(rel=difference(actual[fqn], reference[fqn], scale=scale))
        elif fqn in actual:
            # An unused parameter may have zeros in one layout and no gradient in the other.
            result[fqn] = Deviation(rel=math.inf if bool(actual[fqn].any()) else 0.0, is_extra=True)
        else:
            result[fqn] = Deviation(rel=math.inf if bool(reference[fqn].any()) else 0.0, missing=True)
    wrong = [fqn for fqn, deviation in result.items() if not deviation.rel <= limits.of(kind, fqn)]
    examined = sorted({fqn for names in all_gather_json(wrong) for fqn in names} & reference.keys())
    holders = _holders(run, examined[:_MAX_EXAMINED])
    for fqn in examined[:_MAX_EXAMINED]:
        found = _examine(run, actual.get(fqn), reference[fqn], result[fqn], scale)
        limit = limits.of(kind, fqn) * max(float(reference[fqn].abs().max()), scale)
        pieces, rows = _wrong_pieces(actual.get(fqn), reference[fqn], holders.get(fqn), limit)
        result[fqn] = replace(found, pieces=pieces, rows=rows, other=_other(fqn, actual.get(fqn), reference))
    for fqn in examined[_MAX_EXAMINED:]:
        result[fqn] = _fitted(actual.get(fqn), reference[fqn], result[fqn])
    return result


def _holders(run: Composition, fqns: Sequence[str]) -> dict[str, Tensor]:
    """Return the rank that holds each element of sharded parameters. Collectives: one gather a parameter."""
    import torch
    from torch.distributed.tensor import DTensor

    marked = {}
    for fqn, parameter in run.named_parameters():
        if fqn not in fqns or not isinstance(parameter, DTensor) or any(p.is_partial() for p in parameter.placements):
            continue
        ranks = torch.full(local(parameter).shape, float(run.context.rank), device=parameter.device)
        marked[fqn] = DTensor.from_local(
            ranks,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return gathered(run, marked)


def _wrong_pieces(
    actual: Tensor | None, reference: Tensor, holders: Tensor | None, limit: float
) -> tuple[tuple[int, ...], tuple[int, int] | None]:
    """Return the ranks whose shards alone are wrong, and the wrong rows of the whole tensor if their shards have more.

    The last shard of dims that do not divide is shorter, and its end is where paddings and offsets go wrong.
    """
    if actual is None or holders is None or not actual.shape == reference.shape == holders.shape or not actual.dim():
        return (), None
    # Not "> limit": that is false for NaN.
    is_wrong = ~((actual.double() - reference.double()).abs() <= limit)
    ranks = {int(rank) for rank in holders[is_wrong].unique()}
    if not 0 < len(ranks) < len(holders.unique()):
        return (), None
    wrong = {int(row) for row in is_wrong.nonzero()[:, 0]}
    first, last = min(wrong), max(wrong)
    held = {int(row) for rank in ranks for row in (holders == rank).nonzero()[:, 0]}
    is_run = len(wrong) == last - first + 1 and wrong < held
    return tuple(sorted(ranks)), (first, last) if is_run else None


def _examine(
    run: Composition, actual: Tensor | None, reference: Tensor, deviation: Deviation, scale: float
) -> Deviation:
    """Compare sums and means of the ranks' values along every axis. Collectives: one all-reduce an axis above 1."""
    import torch
    import torch.distributed as dist

    summed, averaged, mixed = {}, {}, {}
    true = reference.double()
    usable = actual is not None and actual.shape == reference.shape
    mine = actual.double() if actual is not None and usable else torch.zeros_like(true)
    for axis in run.context.layout.dense_axes:
        degree = run.context.degrees[axis.name]
        if degree == 1 or axis.role is Role.INDEPENDENT:
            continue
        total = mine.clone().to(run.context.device)
        dist.all_reduce(total, group=run.mesh.get_group(axis.name))
        total = total.cpu()
        summed[axis.name] = difference(total, reference, scale=scale)
        averaged[axis.name] = difference(total / degree, reference, scale=scale)
        nearer = torch.where((total - true).abs() < (mine - true).abs(), total, mine)
        mixed[axis.name] = difference(nearer, reference, scale=scale)
    return replace(
        _fitted(actual, reference, deviation),
        summed=summed,
        averaged=averaged,
        mixed=mixed,
        turned=_turned(run, actual, reference),
    )


def _fitted(actual: Tensor | None, reference: Tensor, deviation: Deviation) -> Deviation:
    found = None if actual is None else fit(actual, reference)
    exact = found is not None and found.residual <= 1e-6
    factor = found.factor if found is not None and exact else None
    if actual is None:
        return replace(deviation, factor=factor)
    elements = _elements(actual, reference) if factor is None and actual.shape == reference.shape else ""
    return replace(deviation, factor=factor, narrow=_narrow(actual), elements=elements)


def _other(fqn: str, actual: Tensor | None, reference: Mapping[str, Tensor]) -> str:
    """Return the parameter whose right values another one has."""
    if actual is None or not actual.any():
        return ""
    alike = (name for name, tensor in reference.items() if name != fqn and tensor.shape == actual.shape)
    return next((name for name in alike if difference(actual, reference[name]) <= _CLOSE), "")


def _elements(actual: Tensor, reference: Tensor) -> str:
    """Return the known change from the right elements to the actual ones."""
    import torch

    found, true = actual.double().cpu(), reference.double().cpu()
    if not bool(found.isfinite().all() and found.any() and true.any()):
        return ""
    largest = float(found.abs().max())
    candidates = {
        "the absolute values of the right ones": true.abs(),
        "the positive ones of the right ones, and zero for the others": true.clamp(min=0.0),
        "the signs of the right ones, times some number": true.sign() * largest,
        f"the right ones, each cut off at {largest:.4g}": true.clamp(-largest, largest),
        "the squares of the right ones": true.square(),
    }
    if true.dim() == 2 and true.shape[0] == true.shape[1]:
        candidates["the right ones, transposed"] = true.t()
    for what, candidate in candidates.items():
        if difference(found, candidate) <= _CLOSE:
            return what
    kept = found != 0
    if difference(found, torch.where(kept, true, 0.0)) <= _CLOSE:
        return "the right ones, some of them replaced by zero"
    if difference(found.flatten().sort().values, true.flatten().sort().values) <= _CLOSE:
        return "the right ones in another order"
    return ""


def _narrow(actual: Tensor) -> str:
    """Return the narrowest dtype that represents a tensor exactly, if it is narrower than the tensor's own."""
    import torch

    if not actual.any():
        return ""
    # In float64 casts to other dtypes do nothing here; this one is to round.
    with without_torch_functions():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype.itemsize < actual.dtype.itemsize and torch.equal(actual.to(dtype).to(actual.dtype), actual):
                return str(dtype).removeprefix("torch.")
    return ""


def narrowed(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors that a narrower dtype represents exactly, unlike the reference's, with that dtype.

    A single rounding error is within the tolerance of the run's own dtypes; the loss of all further digits is not.
    """
    # What is zero by mathematics is rounding noise, multiples of one unit; it has few digits wherever it is computed.
    least = _NOISE * max((float(tensor.abs().max()) for tensor in reference.values() if tensor.numel()), default=0.0)
    both = [fqn for fqn in actual.keys() & reference.keys() if actual[fqn].numel() >= _MANY]
    large = [fqn for fqn in both if float(actual[fqn].abs().max()) > least]
    found = {fqn: _narrow(actual[fqn]) for fqn in sorted(large) if not _narrow(reference[fqn])}
    return {fqn: dtype for fqn, dtype in found.items() if dtype}


def multiple(actual: Tensor, reference: Tensor) -> float | None:
    """Return the factor between two tensors; updates are differences, and have fewer digits than gradients."""
    found = fit(actual, reference)
    return found.factor if found is not None and found.residual <= 1e-4 else None


def _turned(run: Composition, actual: Tensor | None, reference: Tensor) -> tuple[str, ...]:
    """Return the axes whose ranks have the right shards in another order."""
    import torch

    axes = []
    for axis in run.context.layout.dense_axes:
        degree = run.context.degrees[axis.name]
        if degree == 1 or actual is None or actual.shape != reference.shape:
            continue
        for dim in range(reference.dim()):
            pieces = [piece for piece in actual.chunk(degree, dim)]
            turns = (torch.cat(pieces[turn:] + pieces[:turn], dim) for turn in range(1, len(pieces)))
            if any(torch.equal(turned, reference) for turned in turns):
                axes.append(axis.name)
                break
    return tuple(axes)
