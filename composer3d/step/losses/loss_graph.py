"""Reductions and divisors of losses, from their autograd graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.step.losses.bent_means import BentMean, bent_mean
from composer3d.step.losses.loss_factors import (
    constant_divisor,
    constant_factor,
    is_contraction,
    multiple_of,
    node_is_times_zero,
    number,
    past_multiples,
    past_views,
    reciprocal,
    seen_counts,
    uncounted,
)
from composer3d.step.losses.parameter_terms import ELEMENTARY, node_is_of_parameters, past_learned, stacked_losses
from composer3d.step.losses.sample_mixing import summands

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RETURN_A_SUM",
    "Reduction",
    "all_terms",
    "bent_at",
    "divisor_at",
    "divisions_of",
    "divisor_of_mean",
    "divisor_of_multiple",
    "divisors_of_terms",
    "has_bent_terms",
    "has_other_divisor",
    "has_parameter_terms",
    "is_of_parameters",
    "known_reduction",
    "past_factors",
    "penalised_parameters",
    "reduction_of",
    "refuse_unknown_terms",
    "summands_of",
    "terms_of",
    "unknown_mean",
    "unknown_reduction",
    "without_factors",
]

Reduction = Literal["mean", "sum"]
# torch's losses that divide by the elements of their first argument.
_ELEMENTWISE = ("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "SoftMarginLoss")

RETURN_A_SUM = (
    "return a sum and its count instead, for example "
    "F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction='sum'), (target != -100).sum()"
)

_OF_ELEMENTS = ELEMENTARY | {"Gather", "HuberLoss", "LogSigmoid", "LogSoftmax", "MseLoss", "Relu", "SmoothL1Loss"}
_LAST_OPERATION = (
    "cannot tell whether the loss is a mean over this rank's samples: {}. Ranks average means, which is no loss of the "
    "global batch where samples are mixed before (a maximum, a ratio of sums); if it is a mean, or is meant to "
    'be averaged over ranks, write run.backward(loss, reduction="mean"), else give backward (sum, count)'
)


def reduction_of(loss: Tensor) -> Reduction:
    """Return the reduction of a scalar loss, a sum or a mean, from its autograd graph.

    Raises:
        LossError: The last operation is neither.
    """
    return _reduction_at(past_views(loss.grad_fn))


def known_reduction(node: Any) -> Reduction | None:
    """Return the reduction of a node, None where it is neither or unknown."""
    if terms := _terms(node):
        reductions = {known_reduction(term) for term in terms}
        if "sum" in reductions and len(reductions) > 1 and all(_is_sum_or_multiple(term) for term in terms):
            return "sum"
        if len(reductions) != 1 or (any(_is_other(term) for term in terms) and divisor_at(node) is None):
            return None
        return reductions.pop()
    name = type(node).__name__
    # 1 and 2 are torch's numbers of the reductions mean and sum.
    saved = getattr(node, "_saved_reduction", None)
    if name.startswith("DivBackward"):
        return _of_quotient(node)
    if name.startswith("MulBackward"):
        return _of_multiple(node)
    if saved == 1 and bent_mean(node, lambda each: known_reduction(each) is not None) is not None:
        return None  # an error of one number, a mean or sum itself, is none of samples
    if saved == 1 or name.startswith("MeanBackward"):
        return "mean"
    if saved != 2 and not name.startswith(("SumBackward", "NansumBackward")) and not is_contraction(node):
        return None
    of_what = summands(node)
    return None if of_what == "mixed" else "mean" if of_what == "means" else "sum"


def _of_quotient(node: Any) -> Reduction | None:
    divided, divisor = (*node.next_functions, (None, 0))[:2]
    if divisor[0] is None:
        return "mean"
    # Of two sums it is a ratio, which is no mean of ratios; a loss may be divided by a learned number.
    return known_reduction(past_views(divided[0])) if node_is_of_parameters(divisor[0]) else None


def _of_multiple(node: Any) -> Reduction | None:
    """Return the reduction of a sum times numbers: a mean where these divide by as many samples as it shows."""
    if (weighed := past_learned(node)) is not node:
        return known_reduction(weighed)
    if constant_factor(node) is None or known_reduction(past_multiples(node)) != "sum":
        return None
    if divisor_of_multiple(node) is not None:
        return "mean"
    return None if reciprocal(multiple_of(node)) else "sum"


def divisor_of_multiple(node: Any) -> int | None:
    """Return by what a sum is divided that is multiplied by 1 / n, of n samples or elements; None for others."""
    if not type(node).__name__.startswith("MulBackward") or constant_factor(node) is None:
        return None
    divisor = reciprocal(multiple_of(node))
    return divisor if divisor is not None and divisor in seen_counts(past_multiples(node)) else None


def _is_sum_or_multiple(node: Any) -> bool:
    """Return whether a term is a sum, or one times a number, as beside a sum it is no mean: the usual loss of VAEs."""
    return known_reduction(past_multiples(node)) == "sum"


def summands_of(node: Any) -> list[Any]:
    """Return the summands of a node, including losses that are stacked first, without constants."""
    name = type(node).__name__
    if name.startswith(("SumBackward", "MeanBackward")):
        found = stacked_losses(node.next_functions[0][0]) if len(node._saved_self_sym_sizes) == 1 else []
        if name.startswith("Mean") and any(known_reduction(past_factors(past_views(e))[1]) != "mean" for e in found):
            return []  # a mean over them, as over samples
        return found
    if name.startswith("DotBackward"):
        return stacked_losses(node)
    if not name.startswith(("AddBackward", "SubBackward", "RsubBackward")):
        return []
    return [operand for operand, _ in node.next_functions if operand is not None]


def _terms(node: Any) -> tuple[Any, ...]:
    """Return the summands of a node, through constant factors: the two parts of cross entropy with label smoothing.

    Terms of parameters alone, as penalties, are left out: they are no means or sums over samples.
    """
    return tuple(term for term in all_terms(node) if not node_is_of_parameters(term))


def all_terms(node: Any) -> list[Any]:
    """Return what a node adds up, past constant factors, parameters included; nothing where it adds nothing up.

    What is times 0, as loops write of outputs and parameters that a loss leaves out, adds nothing to anything else.
    """
    found, pending = [], summands_of(node)
    while pending:
        term = past_factors(past_views(pending.pop()))[1]
        if parts := summands_of(term):
            pending += parts
        else:
            found.append(term)
    return [term for term in found if not node_is_times_zero(term)] or found


def has_parameter_terms(loss: Any) -> bool:
    """Return whether a loss adds terms of parameters alone, which are equal on all ranks."""
    node = getattr(loss, "grad_fn", None)
    return any(node_is_of_parameters(term) for term in all_terms(past_factors(past_views(node))[1]))


def penalised_parameters(loss: Any) -> Iterator[Tensor]:
    """Yield the leaves of the terms of a loss that depend on parameters alone; sharded ones, before a forward."""
    node = past_factors(past_views(getattr(loss, "grad_fn", None)))[1]
    pending = [term for term in all_terms(node) or [node] if term is not None and node_is_of_parameters(term)]
    seen: set[Any] = set()
    while pending:
        each = pending.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        if type(each).__name__ == "AccumulateGrad":
            yield each.variable
        pending += [operand for operand, _ in each.next_functions]


def is_of_parameters(loss: Any) -> bool:
    """Return whether a loss depends on parameters alone, or on gradients of the global batch: equal on all ranks."""
    node = past_factors(past_views(loss.grad_fn))[1]
    return all(node_is_of_parameters(term, beside=False) for term in all_terms(past_multiples(node)) or [node])


def refuse_unknown_terms(loss: Tensor) -> None:
    """Refuse a loss whose last operations do not show that it is a mean over samples, or a sum.

    Raises:
        LossError: With the operation.
    """
    if known_reduction(past_factors(past_views(loss.grad_fn))[1]) == "sum":
        return
    terms = terms_of(loss)
    for term in terms:
        if not _is_known(term) and bent_at(term) is None:
            raise unknown_mean(_seen(term))
    if len({known_reduction(term) or "mean" for term in terms}) > 1:
        raise unknown_mean("some of its terms are sums")


def terms_of(loss: Tensor) -> tuple[Any, ...]:
    """Return the nodes of a loss' summands, through constant factors; the loss itself if it is no sum."""
    node = past_factors(past_views(loss.grad_fn))[1]
    return _terms(node) or (node,)


def unknown_mean(seen: str) -> LossError:
    """Return an error that explains how to state a loss' reduction, given its graph."""
    return LossError(_LAST_OPERATION.format(seen))


def _seen(node: Any) -> str:
    name, terms = _name(node), _terms(node)
    if len(terms) > 1 and all(known_reduction(term) == "mean" for term in terms):
        numbers = " and ".join(f"{float(each):g}" for each in _divisors(node))
        return f"it adds up means over different numbers, {numbers}, which no one count weighs"
    if name.startswith("MulBackward") and constant_factor(node) is not None:
        if known_reduction(past_multiples(node)) == "sum":
            return uncounted(multiple_of(node), "multiplies")
    if name.startswith(("SumBackward", "NansumBackward")) or getattr(node, "_saved_reduction", None) == 2:
        return "it is a sum, and what it adds up is made of several samples, or weighted by weights whose sum is 1"
    return f"its last operation is {name}"


def _name(node: Any) -> str:
    return type(node).__name__.removesuffix("0")


def bent_at(node: Any) -> BentMean | None:
    """Return the function of one mean that a term is; None for others."""
    return bent_mean(node, lambda each: known_reduction(each) == "mean" and divisor_at(each) is not None)


def has_bent_terms(loss: Tensor) -> bool:
    """Return whether a term of a loss is a function of a mean."""
    return any(bent_at(term) is not None for term in terms_of(loss))


def _is_known(node: Any) -> bool:
    return known_reduction(past_learned(node)) is not None


def _reduction_at(node: Any) -> Reduction:
    known = known_reduction(node)
    if known is not None:
        return known
    raise unknown_reduction("it has no graph" if node is None else _seen(node))


def unknown_reduction(seen: str) -> LossError:
    """Return an error that explains how to state the reduction of a `loss_fn`, given its loss's graph."""
    return LossError(
        f"cannot tell whether the loss is a sum or a mean ({seen}); "
        'pass compose(loss_reduction="mean") or "sum", in a manifest [train] loss = { use = "module:callable", '
        'reduction = "sum" }, or ' + RETURN_A_SUM
    )


def divisor_of_mean(loss: Tensor) -> Tensor | int | None:
    """Return the divisor of a mean from its autograd graph, by which means of micro-batches are combined.

    Cross entropy divides by its valid targets, whatever stands for padding, or by the sum of their class weights;
    `(losses * mask).sum() / mask.sum()` by its mask; other means by their elements.

    Returns:
        A number without a gradient; None where the graph does not say, or the divisor has a gradient itself.
    """
    return divisor_at(past_factors(past_views(loss.grad_fn))[1])


def divisor_at(node: Any) -> Tensor | int | None:
    """Return the divisor of a mean at its node, as `divisor_of_mean`."""
    node = past_learned(node)
    name = type(node).__name__
    if terms := _terms(node):
        divisors = [found for term in terms if (found := divisor_at(term)) is not None]
        if len(divisors) < len(terms):
            return None
        first, *others = divisors
        are_alike = torch_compat.active_fake_mode() is not None or all(
            math.isclose(first, other, rel_tol=1e-6 if float(first) % 1 else 0.0) for other in others
        )  # sums of class weights are rounded
        return first if are_alike else None
    if name.startswith("MeanBackward"):
        return int(node._saved_self_sym_numel)
    if (num := _mean_of_terms(node)) is not None or (num := divisor_of_multiple(node)) is not None:
        return num
    if name.startswith("DivBackward"):
        divided, *divisors = (operand for operand, _ in node.next_functions)
        is_sum = not any(divisors) and known_reduction(past_multiples(past_views(divided))) == "sum"
        if is_sum and not divisors:
            return int(node._saved_other)
        return number(node._saved_other) if is_sum else None
    if known_reduction(node) != "mean":
        return None
    if name.startswith("NllLoss"):
        return number(node._saved_total_weight)
    return int(node._saved_self.numel()) if name.startswith(_ELEMENTWISE) else None


def _mean_of_terms(node: Any) -> int | None:
    """Return the number of terms of `sum(losses) / len(losses)`, whose terms are neither all sums nor all means."""
    if (divisor := constant_divisor(node)) is None:
        return None
    terms = all_terms(past_views(node.next_functions[0][0]))
    is_theirs = len(terms) > 1 and divisor == len(terms)
    return len(terms) if is_theirs and any(known_reduction(term) is None for term in terms) else None


def divisors_of_terms(loss: Tensor) -> list[Tensor | int]:
    """Return the divisors of all terms of a loss, of means over samples or targets, that its graph shows."""
    return list(_divisors(past_factors(past_views(loss.grad_fn))[1]))


def _divisors(node: Any) -> Iterator[Tensor | int]:
    for term in _terms(node) or (node,):
        found = divisor_at(term)
        if found is not None:
            yield found


def divisions_of(loss: Tensor) -> list[Any]:
    """Return the nodes by which the terms of a mean divide their sums; torch's own means have none."""
    node = past_factors(past_views(loss.grad_fn))[1]
    if divisor_at(node) is None:
        return []
    return [term for term in _terms(node) or (node,) if type(term).__name__.startswith("DivBackward")]


def has_other_divisor(loss: Tensor) -> bool:
    """Return whether a mean may be divided by another number than that of its targets, and its graph says by which."""
    return _is_other(past_factors(past_views(loss.grad_fn))[1])


def _is_other(node: Any) -> bool:
    name = type(node).__name__
    if terms := _terms(node):
        return any(_is_other(term) for term in terms) and divisor_at(node) is not None
    if name.startswith("NllLoss"):
        return node._saved_weight is not None
    if name.startswith(("MeanBackward", *_ELEMENTWISE)):
        return any(_selects(operand) for operand, _ in node.next_functions)
    return name.startswith(("DivBackward", "MulBackward")) and divisor_at(node) is not None


def _selects(node: Any) -> bool:
    """Return whether a mask selects elements of the model's output before their mean is taken."""
    seen, pending = set(), [past_views(node)]
    while pending:
        each = pending.pop()
        name = type(each).__name__
        if name.startswith(("IndexBackward", "MaskedSelect")):
            return True
        if each is not None and each not in seen and name.partition("Backward")[0] in _OF_ELEMENTS:
            seen.add(each)
            pending += [operand for operand, _ in each.next_functions]
    return False


def without_factors(loss: Tensor) -> tuple[float, Reduction | None]:
    """Return the factor by which a loop has scaled its loss, and the reduction before it: None if unknown.

    A loop that accumulates divides every loss by the number of its backwards. A sum that is divided, by its tokens
    then, is a mean.
    """
    factor, node = past_factors(past_views(loss.grad_fn))
    return factor, known_reduction(node)


def past_factors(node: Any) -> tuple[float, Any]:
    """Return the constant factor of a term, and the node before it and before learned ones."""
    factor = 1.0
    while (found := constant_factor(node := past_learned(node))) is not None:
        is_own = len(node.next_functions) > 1 or type(node).__name__.startswith("Div")
        if is_own and (known_reduction(past_multiples(found[1])) == "sum" or _mean_of_terms(node) is not None):
            break  # the loop's own factor may make it a mean, and torch divides sums over soft targets
        factor, node = factor * found[0], found[1]
    return factor, node
