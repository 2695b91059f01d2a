"""Deviations of a composition's tensors from one device's, and what is known of those beyond the tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from composer3d.mesh import Role
from composer3d.processes import all_gather_json
from composer3d.step import full, gather_full, local
from composer3d.verification.comparison import Limits, difference, largest_of, scale_of
from composer3d.verification.evidence.known_changes import change_of, few_digits_say_little, narrow_dtype
from composer3d.verification.evidence.multiples import Multiple, Multiples, multiple_of

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["AlongAxis", "Deviation", "Deviations", "Digits", "WrongShards", "deviations_of", "gathered", "related"]

_MAX_EXAMINED = 24
_EXACT = 1e-6  # relative, of a multiple of the right tensor


@dataclass(frozen=True, kw_only=True)
class AlongAxis:
    """A wrong tensor beside those of the other ranks along a mesh axis.

    Args:
        summed: Relative difference after an all-reduce of the ranks' values by sum.
        mixed: The same, with each element taken as it is or summed, whichever is nearer.
        is_turned: Whether the shards are right, and in another order.
    """

    summed: float = math.inf
    mixed: float = math.inf
    is_turned: bool = False


@dataclass(frozen=True, kw_only=True)
class WrongShards:
    """The shards of a wrong tensor that are wrong, where others are right.

    Args:
        ranks: That hold them.
        rows: First and last wrong index along the first dim, where a run of them is wrong and these shards have others
            that are right; None otherwise.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Deviation of one tensor of this rank's composition from one device's.

    Everything but `rel` and `only` is known of tensors beyond the tolerance alone.

    Args:
        rel: max|d| / max|reference|; infinite where only one side has it.
        only: The side that has it, where the other has none.
        multiples: What it, its error or its change is a multiple of.
        axes: Comparison with other ranks, by axis of degree above 1.
        change: Known change from right values, as a phrase; empty where none fits.
        narrow: Narrower dtype that represents every element exactly; empty where none does.
        is_faint: Whether that may be chance or noise, or one device's is as narrow.
        shards: Those that are wrong; None where all are, or without shards.
        is_unmoved: Whether the step left it as it was.
    """

    rel: float
    only: Literal["", "run", "reference"] = ""
    multiples: Multiples = field(default_factory=dict)
    axes: Mapping[str, AlongAxis] = field(default_factory=dict)
    change: str = ""
    narrow: str = ""
    is_faint: bool = False
    shards: WrongShards | None = None
    is_unmoved: bool = False

    @property
    def factor(self) -> float | None:
        """Its factor to the right one; None where it is no multiple."""
        return self.multiples.get(Multiple.RIGHT)


Digits: TypeAlias = Literal["all", "wrong", "none"]
Deviations: TypeAlias = dict[str, Deviation]  # by FQN


def gathered(run: Composition, named: Any) -> dict[str, Tensor]:
    """Return full tensors on the CPU, as the model orders them. Collectives: those of `gather_full`."""
    items = named.items() if isinstance(named, Mapping) else named
    # In order before they are passed on: only the stages that hold a parameter know how it is kept.
    own = {fqn: run.context.in_model_order(fqn, full(tensor)) for fqn, tensor in items}
    return {fqn: tensor.cpu() for fqn, tensor in gather_full(own).items()}


def related(deviations: Deviations, multiples: Mapping[str, Multiples]) -> Deviations:
    """Return deviations with further relations to known tensors, by FQN."""
    return {
        fqn: replace(found, multiples={**found.multiples, **multiples[fqn]}) if fqn in multiples else found
        for fqn, found in deviations.items()
    }


def deviations_of(
    run: Composition,
    actual: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    *,
    limits: Limits,
    kind: str,
    digits: Digits = "wrong",
) -> Deviations:
    """Compare every tensor; examine those beyond the tolerance on some rank, on all ranks together.

    Args:
        run: The composition, on every rank.
        actual: Full tensors by FQN.
        reference: Those of one device.
        limits: Tolerances by kind and FQN.
        kind: What is compared, as the tolerances name it.
        digits: Tensors among which narrow dtypes are looked for. With `all` among right ones too: a single rounding
            error is within the tolerance of the run's own dtypes; the loss of all further digits is not.

    Collectives: one exchange of names; where something is wrong one gather and, for each axis, one all-reduce for each
    of the first 24 wrong tensors.
    """
    scale = scale_of(reference.values())
    result = {fqn: _compared(actual.get(fqn), reference.get(fqn), scale) for fqn in sorted({*actual, *reference})}
    wrong = [fqn for fqn, deviation in result.items() if not deviation.rel <= limits.of(kind, fqn)]
    examined = sorted({fqn for names in all_gather_json(wrong) for fqn in names} & reference.keys())
    holders = _holders(run, examined[:_MAX_EXAMINED])
    for number, fqn in enumerate(examined):
        mine, right, found = actual.get(fqn), reference[fqn], result[fqn]
        if number < _MAX_EXAMINED:
            limit = limits.of(kind, fqn) * max(float(right.abs().max()), scale)
            found = replace(found, axes=_along_axes(run, mine, right, scale))
            found = replace(found, shards=_wrong_shards(mine, right, holders.get(fqn), limit))
        result[fqn] = found if mine is None else _explained(found, fqn, mine, reference, others=number < _MAX_EXAMINED)
    largest = max((largest_of(tensor) for tensor in reference.values() if tensor.numel()), default=0.0)
    asked = {"all": sorted(reference), "wrong": examined, "none": []}[digits]
    for fqn in asked:
        # Experts run the rows of several ranks at once: sums of fewer gradients than one device's, of fewer digits.
        if fqn in actual and run.context.parameter_mesh(fqn) is None:
            result[fqn] = _with_digits(result[fqn], actual[fqn], reference[fqn], largest)
    return result


def _compared(actual: Tensor | None, reference: Tensor | None, scale: float) -> Deviation:
    if actual is not None and reference is not None:
        return Deviation(rel=difference(actual, reference, scale=scale))
    # An unused parameter may have zeros in one layout and no gradient in the other.
    there = actual if actual is not None else reference
    assert there is not None, "a name of either"
    return Deviation(rel=math.inf if bool(there.any()) else 0.0, only="reference" if actual is None else "run")


def _explained(
    found: Deviation, fqn: str, actual: Tensor, reference: Mapping[str, Tensor], *, others: bool
) -> Deviation:
    factor = multiple_of(actual, reference[fqn], residual=_EXACT)
    known = reference if others else {fqn: reference[fqn]}
    change = change_of(fqn, actual, known, elementwise=factor is None)
    return replace(found, multiples={Multiple.RIGHT: factor}, change=change)


def _with_digits(found: Deviation, actual: Tensor, reference: Tensor, largest: float) -> Deviation:
    narrow = narrow_dtype(actual)
    if not narrow:
        return found
    is_faint = few_digits_say_little(actual, reference, narrow=narrow, largest=largest)
    return replace(found, narrow=narrow, is_faint=is_faint)


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


def _wrong_shards(actual: Tensor | None, reference: Tensor, holders: Tensor | None, limit: float) -> WrongShards | None:
    """Return the ranks whose shards alone are wrong, and the wrong rows of the whole tensor if their shards have more.

    The last shard of dims that do not divide is shorter, and its end is where paddings and offsets go wrong.
    """
    if actual is None or holders is None or not actual.shape == reference.shape == holders.shape or not actual.dim():
        return None
    # Not "> limit": that is false for NaN.
    is_wrong = ~((actual.double() - reference.double()).abs() <= limit)
    ranks = {int(rank) for rank in holders[is_wrong].unique()}
    if not 0 < len(ranks) < len(holders.unique()):
        return None
    wrong = {int(row) for row in is_wrong.nonzero()[:, 0]}
    first, last = min(wrong), max(wrong)
    held = {int(row) for rank in ranks for row in (holders == rank).nonzero()[:, 0]}
    is_run = len(wrong) == last - first + 1 and wrong < held
    return WrongShards(ranks=tuple(sorted(ranks)), rows=(first, last) if is_run else None)


def _along_axes(run: Composition, actual: Tensor | None, reference: Tensor, scale: float) -> dict[str, AlongAxis]:
    """Compare with the ranks' values along every axis. Collectives: one all-reduce an axis above 1."""
    import torch
    import torch.distributed as dist

    found = {}
    true = reference.double()
    usable = actual is not None and actual.shape == reference.shape
    mine = actual.double() if actual is not None and usable else torch.zeros_like(true)
    for axis in run.context.layout.dense_axes:
        degree = run.context.degrees[axis.name]
        if degree == 1:
            continue
        is_turned = actual is not None and usable and _is_turned(actual, reference, degree)
        if axis.role is Role.INDEPENDENT:
            found[axis.name] = AlongAxis(is_turned=is_turned)
            continue
        total = mine.clone().to(run.context.device)
        dist.all_reduce(total, group=run.mesh.get_group(axis.name))
        total = total.cpu()
        nearer = torch.where((total - true).abs() < (mine - true).abs(), total, mine)
        found[axis.name] = AlongAxis(
            summed=difference(total, reference, scale=scale),
            mixed=difference(nearer, reference, scale=scale),
            is_turned=is_turned,
        )
    return found


def _is_turned(actual: Tensor, reference: Tensor, degree: int) -> bool:
    """Return whether shards along some dim, over so many ranks, are right in another order."""
    import torch

    for dim in range(reference.dim()):
        pieces = list(actual.chunk(degree, dim))
        turns = (torch.cat(pieces[turn:] + pieces[:turn], dim) for turn in range(1, len(pieces)))
        if any(torch.equal(turned, reference) for turned in turns):
            return True
    return False
