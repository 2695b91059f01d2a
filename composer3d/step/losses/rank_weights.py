"""Weights of ranks' losses in the loss of a global batch, for a loop that announces no target.

Every rank writes what its loss is into slots of its own of one vector, so that a rank whose samples have no targets,
and whose loop computes another loss then, takes part like the others.

Shapes: R ranks, S slots of each, T terms of a loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.mesh import Role
from composer3d.observation.call_sites import caller
from composer3d.step.gradients import add_up
from composer3d.step.losses.divided_sums import (
    DividedSum,
    divided_sum,
    is_times_zero,
    parts_of_terms,
    refuse_groups,
    without_nothing,
)
from composer3d.step.losses.inside_values import InsideValues
from composer3d.step.losses.loss import PENALTY
from composer3d.step.losses.loss_factors import past_views
from composer3d.step.losses.loss_graph import (
    Reduction,
    divisor_of_mean,
    divisors_of_terms,
    has_bent_terms,
    has_parameter_terms,
    is_of_parameters,
    refuse_unknown_terms,
    without_factors,
)
from composer3d.step.losses.loss_terms import has_constants
from composer3d.step.losses.parameter_terms import is_multiplied_by_tensor
from composer3d.step.losses.sample_parts import SampleParts, rows_error, sample_parts
from composer3d.step.losses.term_weights import TermWeights
from composer3d.step.losses.total_divisors import NUM_COUNTS, Part, counts_of, slots_of, total_divisor

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.context import RunContext

__all__ = ["RankLoss", "RankWeights", "Weighted"]

_log = logging.getLogger(__name__)

_SAME = 1e-9
_SAME_WEIGHT = 1e-6  # of constants: less is a number added against a division by zero
_SHOWN = 8
_NO_NUMBER = (
    "%s: the loss is multiplied by %s on data-parallel rank %s, so that loss and gradients of this step are no numbers "
    "on any rank, as on one device"
)


class _Kind(IntEnum):
    NOTHING = 1  # something times 0
    SUM = 2
    MEAN = 3  # its divisor is known
    TERMS = 4  # of several divisors, or beside a penalty
    OTHER = 5  # no divisor is known
    REFUSED = 6


class RankLoss(NamedTuple):
    """Description of a rank's loss, one slot a number.

    Args:
        kind: A `_Kind`.
        divisor: By which the mean is divided, or the first of its terms; 0 without any.
        targets: Number of what the mean adds up; NaN where that is unknown.
        is_zero: Whether the mean is 0.
        numel: Elements that the mean adds up; of terms, whether a divisor may be a bound, or a term bends its mean.
        factor: By which the loop has scaled the loss.
        divisors: Alike where the divisors of all terms are.
        is_counted: Whether the divisor is one of the numbers of samples and elements.
        is_by_tensor: Whether a tensor multiplies the loss.
        is_of_rows: Whether it is a mean of means over single samples, or over single entries of another first dim.
        has_constant: Whether a constant is added to a mean whose divisor is the loop's.
        count_0: One of the numbers that may be that of targets; NaN, as the next ones, where there is none.
    """

    kind: float
    divisor: float = 0.0
    targets: float = 0.0
    is_zero: float = 0.0
    numel: float = 0.0
    factor: float = 1.0
    divisors: float = 0.0
    is_counted: float = 1.0
    is_by_tensor: float = 0.0
    is_of_rows: float = 0.0
    has_constant: float = 0.0
    count_0: float = math.nan
    count_1: float = math.nan
    count_2: float = math.nan
    count_3: float = math.nan

    def part(self) -> Part:
        """Return the mean's sum."""
        return Part(
            divisor=self.divisor,
            count=None if math.isnan(self.targets) else self.targets,
            is_zero=bool(self.is_zero),
            numel=int(self.numel),
            is_counted=bool(self.is_counted),
            counts=counts_of(self[-NUM_COUNTS:]),
        )


_SLOT = {name: place for place, name in enumerate(RankLoss._fields)}


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """A rank's loss, weighted.

    Args:
        loss: Scalar, of which the mean over ranks is the global batch's.
        factor: By which the loop has scaled the losses of this backward; other ranks' where this one's is nothing.
    """

    loss: Tensor
    factor: float


class RankWeights:
    """Weighs the losses of one backward each.

    Attributes:
        num_ranks: Ranks that have other samples or positions.
        num_copies: Ranks that compute one loss each, of the same samples.
        num_samples: Number of samples in this rank's forward; 0 if unknown.

    Args:
        num_ranks: The same.
        index: This one's, among them.
        total: Adds up a tensor over them.
    Collectives: one all-reduce an axis a backward, of nine numbers a rank, and that of `TermWeights`, if it is needed.
    """

    def __init__(self, num_ranks: int = 1, index: int = 0, total: Callable[[Tensor], None] = lambda _: None) -> None:
        self.num_ranks, self.num_samples, self.num_copies = num_ranks, 0, 1
        self._index, self._total = index, total
        self._told_RS: Tensor | None = None

    @classmethod
    def over(cls, context: RunContext) -> RankWeights:
        """Weigh over the ranks of a run that have other samples or positions."""
        axes, index, degree = context.stash(InsideValues).others(context.layout), 0, 1
        for axis in axes:
            index, degree = index * context.degrees[axis] + context.coordinates[axis], degree * context.degrees[axis]
        found = cls(degree, index, partial(add_up, context=context, axes=axes))
        found.num_copies = context.layout.degree(Role.BATCH, Role.SEQUENCE) // degree
        return found

    def ranks(self) -> list[RankLoss]:
        """Return the losses that were weighed last, by rank; none where nothing was. Waits for the device."""
        return [] if self._told_RS is None else [RankLoss(*rank) for rank in self._told_RS.tolist()]

    def divided(self, value: Tensor) -> Callable[[], float | None]:
        """Return what tells by what the mean weighed last, `value` here, is divided over all ranks; None if unknown."""
        told_RS, own = self._told_RS, divisor_of_mean(value) if self._told_RS is None else None
        if told_RS is None:
            return lambda: None if own is None else float(own)

        def added() -> float | None:
            there = [rank for rank in (RankLoss(*each) for each in told_RS.tolist()) if rank.kind != _Kind.NOTHING]
            return sum(rank.divisor for rank in there) if all(rank.kind == _Kind.MEAN for rank in there) else None

        return added

    def weigh(self, value: Tensor, *, reduction: Reduction | None) -> Tensor:
        """Return a rank's loss times its weight, as it is scaled; see `weighted`."""
        factor, known = without_factors(value)
        return self.weighted(value, reduction=reduction, known=known, factor=factor).loss

    def weighted(
        self, value: Tensor, *, reduction: Reduction | None, known: Reduction | None, factor: float
    ) -> Weighted:
        """Return a rank's loss times its weight.

        Args:
            value: Scalar with a graph.
            reduction: As the loop states it; None reads it from the graph.
            known: As its graph shows it.
            factor: By which the loop has scaled it.

        Raises:
            LossError: Ranks cannot be weighed; on all of them.
        """
        self._told_RS = None
        if self.num_ranks == 1 or not value.requires_grad or value.numel() != 1:
            return Weighted(loss=value, factor=factor)
        plain: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        parts = sample_parts(value, self.num_samples)
        rows = parts if parts is not None and parts.are_rows else None
        kind, refusal = self._kind(value, reduction, known, rows)
        counts = None if reduction is not None else (self.num_samples,)
        own_S, divided = self._described(value, kind, factor, counts)
        own_S[_SLOT["is_of_rows"]] = float(rows is not None)
        told_RS = own_S.new_zeros(self.num_ranks, len(own_S))
        told_RS[self._index] = own_S
        self._total(told_RS)
        self._told_RS = told_RS
        if refusal is not None:
            raise refusal
        if torch_compat.active_fake_mode() is not None:
            return Weighted(loss=plain * float(self.num_ranks) if kind is _Kind.SUM else plain, factor=factor)
        is_plain = kind is _Kind.MEAN and divided is None and rows is None
        if is_plain and value.device.type != "cpu" and factor <= 1.0:
            return Weighted(
                loss=self._by_divisors(value, plain, told_RS[:, _SLOT["divisor"]]), factor=factor
            )  # the device is not waited for
        return self._weighted(value, plain, self.ranks(), kind, factor, counts)

    def _kind(
        self, value: Tensor, reduction: Reduction | None, known: Reduction | None, rows: SampleParts | None
    ) -> tuple[_Kind, LossError | None]:
        try:
            if is_times_zero(value):
                return _Kind.NOTHING, None
            if reduction is None and not is_of_parameters(value):
                refuse_unknown_terms(value)
                refuse_groups(value, self.num_samples)
                if rows is not None and rows.is_uneven:
                    raise rows_error(rows.num, rows.shown)
            if is_of_parameters(value):
                return _Kind.OTHER, None  # every rank has it whole
            if (reduction or known) == "sum":
                if has_parameter_terms(value):
                    raise LossError(PENALTY)
                return _Kind.SUM, None
        except LossError as refusal:
            return _Kind.REFUSED, refusal
        if rows is not None and reduction is not None:
            return _Kind.OTHER, None  # as it is stated, whatever the numbers of targets
        if divisor_of_mean(value) is None:
            is_divided = divisors_of_terms(value) or (reduction is None and has_bent_terms(value))
            return (_Kind.TERMS if is_divided else _Kind.OTHER), None
        return (_Kind.TERMS if has_parameter_terms(value) else _Kind.MEAN), None

    def _described(
        self, value: Tensor, kind: _Kind, factor: float, known: tuple[int, ...] | None
    ) -> tuple[Tensor, DividedSum | None]:
        import torch

        told = RankLoss(kind=float(kind), factor=factor)
        like = torch.empty(0, dtype=torch.float64, device=value.device)
        if kind not in (_Kind.MEAN, _Kind.TERMS):
            return like.new_tensor(told), None
        told = told._replace(is_by_tensor=float(is_multiplied_by_tensor(past_views(value.grad_fn))))
        if kind is _Kind.TERMS and known is not None:
            has_bound = any(not part.is_exact for part in parts_of_terms(value)) or has_bent_terms(value)
            told = told._replace(numel=float(has_bound))
        divided = divided_sum(value, known) if kind is _Kind.MEAN else None
        if divided is not None:
            part = divided.part()
            count = math.nan if part.count is None else part.count
            told = told._replace(targets=count, is_zero=part.is_zero, numel=part.numel, is_counted=part.is_counted)
            told = told._replace(has_constant=float(has_constants(value)))
            told = RankLoss(*told[:-NUM_COUNTS], *slots_of(part.counts))
        own_S = like.new_tensor(told)
        # Tensors, which may be on a device that is not waited for.
        divisors = [torch.as_tensor(each).to(like) for each in divisors_of_terms(value)]
        if divisors:
            own_S[_SLOT["divisor"]] = divisors[0]
        if divided is None and divisors:
            own_S[_SLOT["targets"]] = divisors[0]
        # A number that two different lists of divisors hardly share.
        own_S[_SLOT["divisors"]] = sum(each * (index + 1) ** 0.5 for index, each in enumerate(divisors))
        return own_S, divided

    def _by_divisors(self, value: Tensor, plain: Tensor, divisors_R: Tensor) -> Tensor:
        """Weigh a mean of torch's own by its divisor."""
        import torch

        own, whole = divisors_R[self._index], divisors_R.sum()
        weight = torch.where(whole == 0, 1.0, own * self.num_ranks / whole.clamp(min=torch.finfo(torch.float64).tiny))
        settled = without_nothing(plain, value, torch.where(whole == 0, 1.0, own))
        return settled * weight.to(plain.dtype)

    def _weighted(
        self,
        value: Tensor,
        plain: Tensor,
        ranks: Sequence[RankLoss],
        kind: _Kind,
        factor: float,
        known: tuple[int, ...] | None,
    ) -> Weighted:
        import torch

        there = [rank for rank in ranks if rank.kind != _Kind.NOTHING]
        if not there:
            return Weighted(loss=plain, factor=factor)
        self._compare(ranks)
        if odd := [str(index) for index, rank in enumerate(ranks) if not math.isfinite(rank.factor)]:
            if not self._index:
                _log.warning(_NO_NUMBER, caller(())[1], ranks[int(odd[0])].factor, ", ".join(odd[:_SHOWN]))
            return Weighted(loss=plain, factor=factor if math.isfinite(factor) else 1.0)
        kinds = {rank.kind for rank in there}
        total = _multiplied_back(there)
        if _Kind.TERMS in kinds or (total is None and _weighs_constants(there)):
            is_alike = len(there) == self.num_ranks and len(kinds) == 1 and _are_alike(there)
            if not is_alike or any(rank.numel for rank in there):
                weights = TermWeights(self.num_ranks, self._index, self._total)
                plain = weights.weighed(value, plain, is_nothing=kind is _Kind.NOTHING, known=known)
            return Weighted(loss=plain, factor=there[0].factor if kind is _Kind.NOTHING else factor)
        if kind is _Kind.NOTHING:
            return Weighted(loss=plain, factor=there[0].factor if total is None else total)
        if kind is _Kind.SUM:
            return Weighted(loss=plain * float(self.num_ranks), factor=factor)
        if total is not None:
            return Weighted(loss=plain * float(self.num_ranks), factor=total)
        if kind is _Kind.MEAN:
            whole = total_divisor([rank.part() for rank in there])
            own = ranks[self._index].divisor
            if whole:
                plain = without_nothing(plain, value, torch.tensor(own)) * (own * self.num_ranks / whole)
        return Weighted(loss=plain, factor=factor)

    def _compare(self, ranks: Sequence[RankLoss]) -> None:
        """Raise where ranks' losses are not of one kind."""
        kinds = [_Kind(int(rank.kind)) for rank in ranks]
        if _Kind.REFUSED in kinds:
            where = kinds.index(_Kind.REFUSED)
            raise LossError(f"the loss of data-parallel rank {where} was refused, which says why")
        found = {kind for kind in kinds if kind is not _Kind.NOTHING}
        means = [rank for rank in ranks if rank.kind == _Kind.MEAN]
        if any(rank.is_of_rows for rank in means) and len({rank.divisor for rank in means}) > 1:
            raise rows_error(self.num_samples, ", ".join(f"{rank.divisor:g}" for rank in means[:_SHOWN]))
        if len(found) > 1 and found != {_Kind.MEAN, _Kind.TERMS}:
            first, other = sorted(found)[:2]
            raise LossError(
                f"the loss is {_NAMES[first]} on data-parallel rank {kinds.index(first)} and {_NAMES[other]} on rank "
                f"{kinds.index(other)}: compute the same loss on all ranks, or give backward (sum, count)"
            )


_NAMES = {
    _Kind.SUM: "a sum",
    _Kind.MEAN: "a mean",
    _Kind.TERMS: "a sum of means over different numbers",
    _Kind.OTHER: "a loss of unknown normalisation",
}


def _multiplied_back(ranks: Sequence[RankLoss]) -> float | None:
    """Return the number of all ranks' samples by which means are multiplied, each by its rank's own, and so sums again.

    Args:
        ranks: Described, of one kind, without those that have nothing.

    Returns:
        None where all ranks multiply by one number that is none of theirs.

    Raises:
        LossError: Ranks multiply by numbers of their own that their means are not divided by.
    """
    factors, divisors = [rank.factor for rank in ranks], [rank.divisor for rank in ranks]
    is_alike = all(abs(factor - factors[0]) <= _SAME * abs(factor) for factor in factors)
    ratios = [factor / divisor if divisor else factors[0] for factor, divisor in zip(factors, divisors, strict=True)]
    is_sum = ranks[0].kind == _Kind.MEAN and all(abs(ratio - ratios[0]) <= _SAME * abs(ratio) for ratio in ratios)
    if is_alike:
        is_counted = all(rank.is_by_tensor for rank in ranks) and ratios[0] == 1.0
        return sum(factors) if is_sum and is_counted and factors[0] > 1.0 else None
    if is_sum:
        return sum(factors)
    raise LossError(
        f"ranks multiply their losses by {', '.join(f'{factor:g}' for factor in factors[:4])}, each by a number of its "
        "own, which one device has none of; multiply by the same on all ranks, by what each mean was divided by, which "
        "makes sums of them, or give backward (sum, count)"
    )


def _weighs_constants(ranks: Sequence[RankLoss]) -> bool:
    """Return whether weights of means do not add up to one, so that a constant beside a mean would be another one."""
    if not any(rank.has_constant for rank in ranks):
        return False
    added = sum(rank.divisor for rank in ranks)
    return abs(total_divisor([rank.part() for rank in ranks]) - added) > _SAME_WEIGHT * added


def _are_alike(ranks: Sequence[RankLoss]) -> bool:
    """Return whether the terms of all ranks' losses have the same divisors."""
    return all(abs(rank.divisors - ranks[0].divisors) <= _SAME * abs(rank.divisors) for rank in ranks)
