"""Terms of a loss, each weighed over ranks by what it is divided by: a mean over targets beside one over all positions.

Where one weight of the whole loss is none of its terms', the gradient that enters each term is multiplied by the term's
own weight, and the loss' value put together from the terms'.

Shapes: R ranks, T terms of a loss, S slots of each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.step.losses.bent_means import BentMean
from composer3d.step.losses.divided_sums import settle_empty
from composer3d.step.losses.loss_graph import has_parameter_terms
from composer3d.step.losses.loss_terms import Term, Terms, has_constants, separate
from composer3d.step.losses.parameter_terms import learned_products
from composer3d.step.losses.term_values import value_of
from composer3d.step.losses.total_divisors import NUM_COUNTS, Part, counts_of, slots_of, total_divisor
from composer3d.torch_compat.later_backwards import unwatched_grad

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TermWeights", "constant_of"]

_MOST = 32  # terms of a loss
_SHOWN = 8
_SAME = 1e-9
_SAME_CONSTANT = 1e-5  # which is computed in the loss' dtype
_WEIGHT = "composer3d_weight"
_OTHER_CONSTANTS = (
    "the loss is a function of a mean and a constant, and the constant is another one on other ranks: of one device's "
    "mean there is one; all-reduce what it is made of"
)
_WHAT_TO_WRITE = (
    ": divide the sum of each term by its targets on all ranks, which dist.all_reduce adds up, and write "
    'run.backward(loss, reduction="sum"); terms of parameters alone have a backward of their own after it'
)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Contribution of a term to the loss, and its factor there; of a bent mean, the mean and its shift."""

    value: Tensor
    factor: Tensor
    mean: float = 0.0
    shift: float = 0.0


class _Told(NamedTuple):
    """Description of a term, one slot a number."""

    is_there: float = 0.0
    name: float = 0.0
    divisor: float = 0.0
    targets: float = -1.0
    numel: float = 0.0
    is_zero: float = 0.0
    is_counted: float = 1.0
    is_known: float = 0.0
    has_penalty: float = 0.0
    is_bent: float = 0.0
    mean: float = 0.0
    slope: float = 0.0
    shift: float = 0.0
    constant: float = 0.0
    count_0: float = math.nan
    count_1: float = math.nan
    count_2: float = math.nan
    count_3: float = math.nan

    def part(self) -> Part:
        return Part(
            divisor=self.divisor,
            count=None if self.targets < 0 else self.targets,
            is_zero=bool(self.is_zero),
            numel=int(self.numel),
            is_counted=bool(self.is_counted),
            counts=counts_of(self[-NUM_COUNTS:]),
        )


class TermWeights:
    """Weighs the terms of one backward's losses, of ranks of which some divide some terms by other numbers than others.

    Args:
        num_ranks: Ranks that have other samples or positions.
        index: This one's, among them.
        total: Adds up a tensor over them.

    Collectives: one all-reduce an axis, of eighteen numbers for each of 32 terms and rank.
    """

    def __init__(self, num_ranks: int, index: int, total: Callable[[Tensor], None]) -> None:
        self._num_ranks, self._index, self._total = num_ranks, index, total

    def weighed(self, value: Tensor, plain: Tensor, *, is_nothing: bool, known: tuple[int, ...] | None) -> Tensor:
        """Return a rank's loss, of which the mean over ranks is the global batch's, its terms' gradients weighed.

        Args:
            value: Scalar with a graph.
            plain: Itself, no DTensor.
            is_nothing: Whether it is something times 0.
            known: Numbers that may be a term's divisor; None for any.

        Raises:
            LossError: A term cannot be weighed by itself; on all ranks.
        """
        import torch

        terms = Terms() if is_nothing else separate(value, known)
        seen = _seen_of(value, plain, terms)
        told = [
            _told(term, None if seen is None else seen[place], has_parameter_terms(value))
            for place, term in enumerate(terms.found[:_MOST])
        ]
        if not told and not is_nothing:
            told = [_Told(is_there=1.0)]
        told_RTS = torch.zeros(self._num_ranks, _MOST, len(_Told._fields), dtype=torch.float64, device=value.device)
        for place, each in enumerate(told):
            told_RTS[self._index, place] = torch.tensor(each, dtype=torch.float64)
        self._total(told_RTS)
        ranks = [[_Told(*term) for term in rank if term[0]] for rank in told_RTS.tolist()]
        there = [rank for rank in ranks if rank]
        names = {tuple(term.name for term in rank) for rank in there}
        if len(names) != 1 or not all(next(iter(names))) or len(there[0]) == _MOST:
            raise self._other_terms(ranks)
        wholes = [_whole([term.part() for term in column]) for column in zip(*there, strict=True)]
        weights_RT = [
            [term.divisor * self._num_ranks / whole if whole else 1.0 for term, whole in zip(rank, wholes, strict=True)]
            for rank in there
        ]
        is_even = all(abs(weight - 1) <= _SAME for rank in weights_RT for weight in rank)
        if len(there) == self._num_ranks and is_even and not any(term.is_bent for term in there[0]):
            return plain
        if len(there) < self._num_ranks and any(rank[0].has_penalty for rank in there):
            raise self._other_terms(ranks)
        if not all(term.is_known for rank in there for term in rank):
            raise self._uneven(ranks, wholes)
        if any(_differ(column) for column in zip(*there, strict=True)):
            raise LossError(_OTHER_CONSTANTS)
        if is_nothing:
            return plain
        own = weights_RT[sum(bool(rank) for rank in ranks[: self._index])]
        assert seen is not None
        return _apply(plain, terms.found, seen, own, [_whole_mean(column) for column in zip(*there, strict=True)])

    def _other_terms(self, ranks: Sequence[Sequence[_Told]]) -> LossError:
        if any(rank and not rank[0].name for rank in ranks):
            seen = (
                "ranks divide terms of the loss by different numbers, and its graph does not separate them, as where "
                "one operation weighs several (torch.dot), or one term is made of another"
            )
        else:
            numbers = ", ".join(str(len(rank)) for rank in ranks[:_SHOWN])
            seen = (
                "ranks divide terms of the loss by different numbers, and do not add up the same terms "
                f"({numbers} on the data-parallel ranks): compute all of them on every rank, or else"
            )
        return LossError(seen + _WHAT_TO_WRITE)

    def _uneven(self, ranks: Sequence[Sequence[_Told]], wholes: Sequence[float]) -> LossError:
        for place, whole in enumerate(wholes):
            found = [rank[place].divisor if rank else 0.0 for rank in ranks]
            if any(abs(each * len(ranks) - whole) > _SAME * whole for each in found):
                break
        shown = ", ".join(f"{each:g}" for each in found[:_SHOWN])
        return LossError(
            f"a term of the loss is a mean over {found[self._index]:g} targets on this rank, and over others elsewhere "
            f"({shown} on the data-parallel ranks, {whole:g} in all), so ranks do not weigh the same, and the graph "
            f"does not show the values of the terms, each of which would be weighed by itself{_WHAT_TO_WRITE}"
        )


def constant_of(loss: Tensor, known: tuple[int, ...] | None) -> float | None:
    """Return what a loss adds to its means; None where its graph does not show it, or that is made of parameters.

    Args:
        loss: Scalar with a graph.
        known: Numbers that may be a term's divisor; None for any.
    """
    if not has_constants(loss):
        return 0.0
    seen = None if has_parameter_terms(loss) else _seen_of(loss, loss, separate(loss, known))
    return None if seen is None else float(loss.detach()) - sum(float(each.value) for each in seen)


def _whole(parts: Sequence[Part]) -> float:
    """Return the divisor of a term's sum over all ranks."""
    added, first = sum(part.divisor for part in parts), parts[0].divisor
    if all(abs(part.divisor - first) <= _SAME * first for part in parts):
        has_bound = any(part.is_exact for part in parts) and any(part.count == 0 for part in parts)
        if not has_bound or any(part.count is None for part in parts):
            return added
    return total_divisor(parts)


def _differ(terms: Sequence[_Told]) -> bool:
    """Return whether ranks apply a function to their means with constants of their own."""
    own = [term for term in terms if term.is_bent and term.divisor]
    _, shift = _whole_mean(terms)
    return any(
        abs(each - first) > _SAME_CONSTANT * max(abs(first), abs(term.mean * term.slope))
        for term in own
        for each, first in (
            (term.slope, own[0].slope),
            (term.shift, shift),
            (term.constant, own[0].constant),
        )
    )


def _whole_mean(terms: Sequence[_Told]) -> tuple[float, float]:
    """Return the mean of all ranks, and what is added to it in a function; of terms that are bent."""
    own = [term for term in terms if term.divisor]
    if not own:
        return 0.0, 0.0
    shift = next((term.shift for term in own if not math.isnan(term.shift)), math.nan)  # relu's where it is seen
    return sum(term.divisor * term.mean for term in own) / sum(term.divisor for term in own), shift


def _told(term: Term, seen: _Seen | None, has_penalty: bool) -> _Told:
    part, bent = term.part, term.bent
    names = type(term.mean).__name__ + ("" if bent is None else type(bent.node).__name__)
    return _Told(
        is_there=1.0,
        name=float(zlib.crc32(names.encode())),
        divisor=part.divisor,
        targets=-1.0 if part.count is None else part.count,
        numel=part.numel,
        is_zero=part.is_zero,
        is_counted=part.is_counted,
        is_known=seen is not None,
        has_penalty=has_penalty,
        is_bent=bent is not None,
        mean=0.0 if seen is None else seen.mean,
        slope=0.0 if bent is None else bent.slope,
        shift=0.0 if seen is None else seen.shift,
        constant=0.0 if bent is None else bent.constant(),
        **dict(zip(_Told._fields[-NUM_COUNTS:], slots_of(part.counts), strict=True)),
    )


def _seen_of(loss: Tensor, plain: Tensor, terms: Terms) -> list[_Seen] | None:
    """Return what each term contributes to the loss; None where the graph does not show it."""
    import torch

    if not terms.found or loss is not plain:
        return None
    for term in terms.found:
        for node in (term.outer, term.mean):
            if (handle := node.metadata.pop(_WEIGHT, None)) is not None:
                handle.remove()
    outers = list({term.outer: None for term in terms.found})
    if any(torch_compat.node_shape(node) is None for node in outers):
        return None
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in outers]
    factors = dict(zip(outers, unwatched_grad(loss, edges, retain_graph=True), strict=True))
    is_empty = any(not term.part.divisor for term in terms.found)
    for beside_zero in (False, True) if terms.is_all and not is_empty else (False,):
        found = [_seen(term, factors[term.outer], beside_zero) for term in terms.found]
        own = [each for each in found if each is not None]
        if len(own) < len(found):
            continue
        if is_empty or not terms.is_all:
            return None if is_empty and not terms.is_all else own
        most = 1e-9 if plain.dtype is torch.float64 else 1e-4 if plain.dtype is torch.float32 else 1e-1
        values = torch.stack([each.value.double() for each in own])
        if float((values.sum() - plain.detach()).abs()) <= most * float(values.abs().sum()):
            return own
    return None


def _seen(term: Term, factor: Tensor, beside_zero: bool) -> _Seen | None:
    if term.bent is None:
        value = value_of(term.outer, beside_zero=beside_zero)
        if value is None:
            return None
        return _Seen(value=_at(factor * value, term.place), factor=_at(factor, term.place))
    mean, given = value_of(term.mean, beside_zero=beside_zero), term.bent.given()
    if mean is None and given is not None and not term.bent.has_shift:
        mean = given / term.bent.slope
    shift = None if mean is None else term.bent.shift(mean)
    if mean is None or shift is None:
        return None
    own = float(mean) if term.part.divisor else 0.0
    value = factor.reshape(()) * term.bent.at(own, shift)[0]
    return _Seen(value=value, factor=factor.reshape(()), mean=own, shift=shift)


def _at(value: Tensor, place: int | None) -> Tensor:
    return value.reshape(()) if place is None else value[place]


def _apply(
    plain: Tensor,
    terms: Sequence[Term],
    seen: Sequence[_Seen],
    weights: Sequence[float],
    means: Sequence[tuple[float, float]],
) -> Tensor:
    """Weigh each term's gradient, and return the loss with the weighed value."""
    import torch

    empty = [term for term in terms if not term.part.divisor]
    whole = plain.new_zeros(()) if empty else plain.detach().reshape(())
    for term, own, weight, mean in zip(terms, seen, weights, means, strict=True):
        if not empty:
            whole = whole - own.value
        if term.bent is not None:
            value, derivative = term.bent.at(*mean)
            whole = whole + own.factor * value
            _bend(term.bent, derivative * weight)
        elif weight:
            whole = whole + weight * own.value
    for node in {term.outer: None for term in terms if term.bent is None}:
        scales = [weight for term, weight in zip(terms, weights, strict=True) if term.outer is node]
        is_vector = any(term.outer is node and term.place is not None for term in terms)
        node.metadata[_WEIGHT] = node.register_prehook(_scaling(scales, is_vector))
    for term in empty:
        settle_empty([term.mean, *learned_products(term.outer)], torch.tensor(0.0))
    return _with_value(plain.reshape(()), whole.to(plain.dtype))


def _bend(bent: BentMean, derivative: float) -> None:
    """Give a mean the gradient of a function of all ranks' mean, in place of its own's."""
    entered: list[Any] = []

    def enter(gradients: Any) -> None:
        entered[:] = [gradients[0]]

    def leave(gradients: Any) -> Any:
        return (gradients[0] if not entered else entered[0].reshape(()) * derivative, *gradients[1:])

    bent.node.metadata[_WEIGHT] = bent.node.register_prehook(enter)
    bent.mean.metadata[_WEIGHT] = bent.mean.register_prehook(leave)


def _scaling(scales: Sequence[float], is_vector: bool) -> Callable[[Any], Any]:
    def scaled(gradients: Any) -> Any:
        own = gradients[0]
        if own is None:
            return None
        return (own * (own.new_tensor(scales) if is_vector else scales[0]), *gradients[1:])

    return scaled


def _with_value(loss: Tensor, value: Tensor) -> Tensor:
    """Return a loss whose value is another one, with its own gradient."""
    import torch

    class TermsWeighed(torch.autograd.Function):
        """Sum of terms, each of which has had its gradient weighed."""

        @staticmethod
        def forward(ctx: Any, own: Tensor, weighed: Tensor) -> Tensor:
            return weighed.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0], None

    found: Tensor = TermsWeighed.apply(loss, value)
    return found
