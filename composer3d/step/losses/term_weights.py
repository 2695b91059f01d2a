"""Terms of a loss, each weighed over ranks by what it is divided by: a mean over targets beside one over all positions.

Where one weight of the whole loss is none of its terms', the gradient that enters each term is multiplied by the term's
own weight, and the loss' value put together from the terms'.

Shapes: R ranks, T terms of a loss, S slots of each.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.step.losses.divided_sums import part_of_term, settle_empty
from composer3d.step.losses.loss_factors import node_is_times_zero, past_views
from composer3d.step.losses.loss_graph import divisor_at, has_parameter_terms, past_factors, summands_of
from composer3d.step.losses.parameter_terms import learned_products, node_is_of_parameters
from composer3d.step.losses.sample_mixing import base, operands_of
from composer3d.step.losses.term_values import value_of
from composer3d.step.losses.total_divisors import Part, total_divisor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TermWeights"]

_MOST = 32  # terms of a loss
_SHOWN = 8
_LOOKED_AT = 500  # nodes before the terms
_SAME = 1e-9
_WEIGHT = "composer3d_weight"
_WHAT_TO_WRITE = (
    ": divide the sum of each term by its targets on all ranks, which dist.all_reduce adds up, and write "
    'run.backward(loss, reduction="sum"); terms of parameters alone have a backward of their own after it'
)


@dataclass(frozen=True, kw_only=True)
class _Term:
    """A term of a loss.

    Args:
        outer: Node of the term with its factors.
        place: Of the term in what that node computed, where it is a vector.
        mean: Node of the mean.
        part: What it was divided by, and adds up.
    """

    outer: Any
    place: int | None
    mean: Any
    part: Part


@dataclass
class _Terms:
    """Terms of a loss.

    Attributes:
        found: Those that are divided; none where the graph does not separate them.
        is_all: Whether the loss is their sum, without constants and terms of parameters.
    """

    found: list[_Term] = field(default_factory=list)
    is_all: bool = True


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

    def part(self) -> Part:
        return Part(
            divisor=self.divisor,
            count=None if self.targets < 0 else self.targets,
            is_zero=bool(self.is_zero),
            numel=int(self.numel),
            is_counted=bool(self.is_counted),
        )


class TermWeights:
    """Weighs the terms of one backward's losses, of ranks of which some divide some terms by other numbers than others.

    Args:
        num_ranks: Ranks that have other samples or positions.
        index: This one's, among them.
        total: Adds up a tensor over them.
    Collectives: one all-reduce an axis, of nine numbers a rank and term.
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

        terms = _Terms() if is_nothing else _terms_of(value, known)
        values = _values_of(value, plain, terms)
        told = [_told(term, values is not None, has_parameter_terms(value)) for term in terms.found[:_MOST]]
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
        if len(there) == self._num_ranks and all(abs(weight - 1) <= _SAME for rank in weights_RT for weight in rank):
            return plain
        if len(there) < self._num_ranks and any(rank[0].has_penalty for rank in there):
            raise self._other_terms(ranks)
        if not all(term.is_known for rank in there for term in rank):
            raise self._uneven(ranks, wholes)
        if is_nothing:
            return plain
        own = weights_RT[sum(bool(rank) for rank in ranks[: self._index])]
        assert values is not None
        return _apply(plain, terms.found, values, own)

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


def _whole(parts: Sequence[Part]) -> float:
    """Return the divisor of a term's sum over all ranks."""
    added, first = sum(part.divisor for part in parts), parts[0].divisor
    if all(abs(part.divisor - first) <= _SAME * first for part in parts):
        has_bound = any(part.is_exact for part in parts) and any(part.count == 0 for part in parts)
        if not has_bound or any(part.count is None for part in parts):
            return added
    return total_divisor(parts)


def _told(term: _Term, is_known: bool, has_penalty: bool) -> _Told:
    part = term.part
    return _Told(
        is_there=1.0,
        name=float(zlib.crc32(type(term.mean).__name__.encode())),
        divisor=part.divisor,
        targets=-1.0 if part.count is None else part.count,
        numel=part.numel,
        is_zero=part.is_zero,
        is_counted=part.is_counted,
        is_known=is_known,
        has_penalty=has_penalty,
    )


def _terms_of(loss: Tensor, known: tuple[int, ...] | None) -> _Terms:
    """Return the terms of a loss that are divided, each at the outermost node that is its own."""
    terms, pending = _Terms(), [loss.grad_fn]
    while pending:
        outer = pending.pop()
        mean = past_factors(past_views(outer))[1]
        parts = summands_of(mean)
        if not parts or node_is_of_parameters(mean):
            terms.is_all &= _add(terms.found, outer, None, mean, known)
        elif learned_products(outer, into_sums=False):
            return _Terms()  # one learned number of several terms
        elif base(mean) in ("Add", "Sub", "Rsub"):
            terms.is_all &= len(parts) == 2
            pending += parts
        elif (vector := _vector(mean)) is None:
            return _Terms()
        else:
            terms.is_all &= vector is past_views(mean.next_functions[0][0])
            for place, each in enumerate(operands_of(_stack(vector))):
                inner = past_factors(past_views(each))[1]
                if summands_of(inner):
                    return _Terms()
                terms.is_all &= _add(terms.found, vector, place, inner, known)
    are_known = bool(terms.found) and all(divisor_at(term.mean) is not None for term in terms.found)
    return terms if are_known and not _is_nested(terms.found) else _Terms()


def _add(found: list[_Term], outer: Any, place: int | None, mean: Any, known: tuple[int, ...] | None) -> bool:
    """Add a term; return whether it is one of samples."""
    if node_is_of_parameters(mean):
        return False
    if node_is_times_zero(mean) or any(term.outer is outer and term.place == place for term in found):
        return True
    part = part_of_term(mean, known)
    found.append(_Term(outer=outer, place=place, mean=mean, part=part))
    return True


def _vector(mean: Any) -> Any:
    """Return the node of a vector of terms, past what of parameters is added to it; None where it is not seen."""
    node = past_views(mean.next_functions[0][0]) if base(mean) in ("Sum", "Mean") else None
    while base(node) in ("Add", "Sub"):
        own = [each for each in operands_of(node) if not node_is_of_parameters(each)]
        if len(own) != 1:
            return None
        node = past_views(own[0])
    return node if _stack(node) is not None and torch_compat.node_shape(node) is not None else None


def _stack(node: Any) -> Any:
    """Return the node that stacks terms, past products with learned numbers."""
    while base(node) in ("Mul", "Div"):
        own = [each for each in operands_of(node) if not node_is_of_parameters(each)]
        node = past_views(own[0]) if len(own) == 1 else None
    return node if base(node) in ("Stack", "Cat") else None


def _is_nested(terms: Sequence[_Term]) -> bool:
    """Return whether a term is made of another one, whose gradient enters it by two ways."""
    outers = {term.outer for term in terms}
    pending, seen = [operand for term in terms for operand in operands_of(term.mean)], set[Any]()
    while pending and len(seen) < _LOOKED_AT:
        node = pending.pop(0)
        if node in outers:
            return True
        if node not in seen:
            seen.add(node)
            pending += operands_of(node)
    return False


def _values_of(loss: Tensor, plain: Tensor, terms: _Terms) -> list[Tensor] | None:
    """Return what each term contributes to the loss; None where the graph does not show it."""
    import torch

    if not terms.found or loss is not plain:
        return None
    outers = list({term.outer: None for term in terms.found})
    for node in outers:
        if (handle := node.metadata.pop(_WEIGHT, None)) is not None:
            handle.remove()
    if any(torch_compat.node_shape(node) is None for node in outers):
        return None
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node in outers]
    factors = dict(zip(outers, torch.autograd.grad(loss, edges, retain_graph=True), strict=True))
    is_empty = any(not term.part.divisor for term in terms.found)
    for beside_zero in (False, True) if terms.is_all and not is_empty else (False,):
        computed = {node: value_of(node, beside_zero=beside_zero) for node in outers}
        if any(each is None for each in computed.values()):
            continue
        found = [_at(factors[term.outer] * computed[term.outer], term.place) for term in terms.found]
        if not terms.is_all:
            return None if is_empty else found
        most = 1e-9 if plain.dtype is torch.float64 else 1e-4 if plain.dtype is torch.float32 else 1e-1
        difference = float((sum(found, plain.new_zeros(())) - plain.detach()).abs())
        if is_empty or difference <= most * float(sum((each.abs() for each in found), plain.new_zeros(()))):
            return found
    return None


def _at(value: Tensor, place: int | None) -> Tensor:
    return value.reshape(()) if place is None else value[place]


def _apply(plain: Tensor, terms: Sequence[_Term], values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weigh each term's gradient, and return the loss with the weighed value."""
    import torch

    for node in {term.outer: None for term in terms}:
        scales = [weight for term, weight in zip(terms, weights, strict=True) if term.outer is node]
        is_vector = any(term.outer is node and term.place is not None for term in terms)
        node.metadata[_WEIGHT] = node.register_prehook(_scaling(scales, is_vector))
    empty = [term for term in terms if not term.part.divisor]
    for term in empty:
        settle_empty([term.mean, *learned_products(term.outer)], torch.tensor(0.0))
    whole = plain.new_zeros(()) if empty else plain.detach().reshape(())
    for value, weight in zip(values, weights, strict=True):
        if weight:
            whole = whole + (weight if empty else weight - 1) * value
        elif not empty:
            whole = whole - value
    return _with_value(plain.reshape(()), whole.to(plain.dtype))


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
