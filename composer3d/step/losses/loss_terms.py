"""Terms of a loss that are divided by numbers of their own, each at the node that is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.bent_means import BentMean
from composer3d.step.losses.divided_sums import part_of_term
from composer3d.step.losses.loss_factors import node_is_times_zero, past_views
from composer3d.step.losses.loss_graph import bent_at, divisor_at, past_factors, summands_of
from composer3d.step.losses.parameter_terms import learned_products, node_is_of_parameters
from composer3d.step.losses.sample_mixing import base, operands_of
from composer3d.step.losses.total_divisors import Part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Term", "Terms", "has_constants", "separate"]

_LOOKED_AT = 500  # nodes before the terms


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a loss.

    Args:
        outer: Node of the term with its factors.
        place: Of the term in what that node computed, where it is a vector.
        mean: Node of the mean.
        part: What it was divided by, and adds up.
        bent: Function of the mean that the term is.
    """

    outer: Any
    place: int | None
    mean: Any
    part: Part
    bent: BentMean | None = None


@dataclass
class Terms:
    """Terms of a loss.

    Attributes:
        found: Those that are divided; none where the graph does not separate them.
        is_all: Whether the loss is their sum, without constants and terms of parameters.
    """

    found: list[Term] = field(default_factory=list)
    is_all: bool = True


def separate(loss: Tensor, known: tuple[int, ...] | None) -> Terms:
    """Return the terms of a loss that are divided, each at the outermost node that is its own."""
    terms, pending = Terms(), [loss.grad_fn]
    while pending:
        outer = pending.pop()
        mean = past_factors(past_views(outer))[1]
        parts = summands_of(mean)
        if not parts or node_is_of_parameters(mean):
            if bent_at(mean) is not None and (learned_products(outer) or known is None):
                return Terms()  # a learned number would be given the gradient of a rank's mean
            terms.is_all &= _add(terms.found, outer, None, mean, known)
        elif learned_products(outer, into_sums=False):
            return Terms()  # one learned number of several terms
        elif base(mean) in ("Add", "Sub", "Rsub"):
            terms.is_all &= len(parts) == 2
            pending += parts
        elif (vector := _vector(mean)) is None:
            return Terms()
        else:
            terms.is_all &= vector is past_views(mean.next_functions[0][0])
            for place, each in enumerate(operands_of(_stack(vector))):
                inner = past_factors(past_views(each))[1]
                if summands_of(inner):
                    return Terms()
                terms.is_all &= _add(terms.found, vector, place, inner, known)
    are_known = bool(terms.found) and all(
        divisor_at(term.mean) is not None and (term.bent is None or term.part.is_counted) for term in terms.found
    )
    return terms if are_known and not _is_nested(terms.found) else Terms()


def has_constants(loss: Tensor) -> bool:
    """Return whether a loss adds up constants, or terms of parameters, which no number of targets divides."""
    pending = [loss.grad_fn]
    while pending:
        node = past_factors(past_views(pending.pop()))[1]
        parts = summands_of(node)
        if any(node_is_of_parameters(each) for each in parts) or (
            base(node) in ("Add", "Sub", "Rsub") and len(parts) < 2
        ):
            return True
        if base(node) in ("Sum", "Mean") and parts and _stack(past_views(node.next_functions[0][0])) is None:
            return True  # beside a vector of terms
        pending += parts
    return False


def _add(found: list[Term], outer: Any, place: int | None, mean: Any, known: tuple[int, ...] | None) -> bool:
    """Add a term; return whether it is one of samples."""
    if node_is_of_parameters(mean):
        return False
    if node_is_times_zero(mean) or any(term.outer is outer and term.place == place for term in found):
        return True
    bent = bent_at(mean)
    if bent is not None:
        found.append(Term(outer=bent.node, place=None, mean=bent.mean, part=part_of_term(bent.mean, known), bent=bent))
    else:
        found.append(Term(outer=outer, place=place, mean=mean, part=part_of_term(mean, known)))
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


def _is_nested(terms: Sequence[Term]) -> bool:
    """Return whether a term is made of another one, whose gradient enters it by two ways."""
    outers = {term.outer for term in terms} | {term.mean for term in terms if term.bent is not None}
    bent = [term.mean for term in terms if term.bent is not None]
    if len({*bent}) < len(bent) or {*bent} & {term.mean for term in terms if term.bent is None}:
        return True
    pending, seen = [operand for term in terms for operand in operands_of(term.mean)], set[Any]()
    while pending and len(seen) < _LOOKED_AT:
        node = pending.pop(0)
        if node in outers:
            return True
        if node not in seen:
            seen.add(node)
            pending += operands_of(node)
    return False
