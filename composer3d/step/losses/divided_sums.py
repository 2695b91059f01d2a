"""Sums that a loss divides itself: what each was divided by, and how many targets it adds up, from its autograd graph.

A clamp of a count leaves no trace in the graph, nor does any other arithmetic without gradients. What the sum adds up
does: the mask that losses were multiplied by, what was selected, and targets that are not padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.step.losses.loss_factors import (
    constant_divisor,
    is_python_number,
    node_is_times_zero,
    number,
    past_multiples,
    past_views,
    seen_counts,
    uncounted,
)
from composer3d.step.losses.loss_graph import (
    all_terms,
    bent_at,
    divisions_of,
    divisor_at,
    divisor_of_mean,
    known_reduction,
    terms_of,
    unknown_mean,
)
from composer3d.step.losses.parameter_terms import learned_products, past_learned
from composer3d.step.losses.sample_mixing import means_groups
from composer3d.step.losses.sample_parts import refuse_summed_rows
from composer3d.step.losses.total_divisors import Part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DividedSum",
    "divided_sum",
    "is_times_zero",
    "part_of_term",
    "parts_of_terms",
    "refuse_groups",
    "settle_empty",
    "without_nothing",
]

# Of elements, each of which is 0 where its operand is 0.
_ZERO_STAYS = ("Abs", "Pow", "Sqrt", "Relu", "Clamp", "Sum", "Mean", "Expand", "Squeeze", "Unsqueeze", "Transpose")


@dataclass(frozen=True, kw_only=True)
class DividedSum:
    """A sum and its divisor.

    Args:
        divisor: Scalar without a gradient.
        counts: Scalars, any of which may be the number of targets that the sum adds up; none where it is not seen.
        seen: Other numbers of samples or elements that its graph shows; None where the divisor is stated to be a
            count, or divides a mean.
        numel: Elements that it adds up, padding included.
        is_zero: Scalar, whether the loss is 0.
    """

    divisor: Tensor
    counts: tuple[Tensor, ...]
    seen: tuple[float, ...] | None
    numel: int
    is_zero: Tensor

    def part(self, factor: float = 1.0) -> Part:
        """Return it in numbers, which waits for the device.

        Args:
            factor: By which a loop has multiplied its divisor.
        """
        import torch

        divisor, is_zero, *counts = torch.stack([each.double() for each in self._scalars()]).tolist()
        is_counted = self.seen is None or _is_among(divisor, [*counts, *self.seen, self.numel])
        found = min(counts, key=lambda count: (abs(count - divisor), -count)) if counts else None
        if self.numel == divisor and (found is None or divisor > 1):
            found = divisor
        return Part(
            divisor=divisor * factor,
            count=None if found is None else found * factor,
            is_zero=bool(is_zero),
            numel=self.numel,
            is_counted=is_counted,
            counts=tuple(count * factor for count in counts),
        )

    def _scalars(self) -> tuple[Tensor, ...]:
        device = self.divisor.device
        return (self.divisor, *(each.to(device) for each in (self.is_zero, *self.counts)))


def divided_sum(loss: Tensor, known: Sequence[float] | None = ()) -> DividedSum | None:
    """Return the sum that a mean divides itself; None for torch's own means, whose divisor is their count.

    Args:
        loss: A mean.
        known: Numbers that may be its divisor, whatever the graph shows; None for any.

    Memory: none. The device is not waited for.
    """
    if torch_compat.active_fake_mode() is not None or not (nodes := divisions_of(loss)) or _has_class_weights(loss):
        return None
    divisor = number(nodes[0]._saved_other)
    if divisor is None:
        return None
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    summed = _divided_by(nodes[0])
    counts, numel = _counts(summed)
    numbers = None if known is None or known_reduction(summed) == "mean" else _numbers(summed)
    return DividedSum(
        divisor=divisor,
        counts=counts,
        seen=None if numbers is None else (*numbers, *(known or ())),
        numel=numel,
        is_zero=whole.detach().reshape(()) == 0,
    )


def parts_of_terms(loss: Tensor) -> list[Part]:
    """Return the sums that the terms of a loss divide by numbers of their own, one after the other.

    Memory: none. The device is waited for.
    """
    if torch_compat.active_fake_mode() is not None:
        return []
    return [part_of_term(node, ()) for node in terms_of(loss) if _is_divided(node)]


def part_of_term(node: Any, known: Sequence[float] | None) -> Part:
    """Return a mean as its sum and divisor.

    Of what is selected, rows or elements are its count, where the divisor is one of these.

    Args:
        node: Of the mean.
        known: Numbers that may be its divisor, whatever the graph shows; None for any.

    Memory: none. The device is waited for.
    """
    import torch

    if not _is_divided(node):
        divisor = float(divisor_at(node) or 0.0)
        return Part(divisor=divisor, count=divisor, numel=int(divisor))
    summed = _divided_by(node)
    counts, numel = _counts(summed)
    divided = number(node._saved_other)
    assert divided is not None
    given = DividedSum(
        divisor=divided,
        counts=counts,
        seen=None if known is None else (*_numbers(summed), *known),
        numel=numel,
        is_zero=torch.tensor(numel == 0),
    ).part()
    if given.count is None and (not numel or given.is_counted):
        given = replace(given, count=given.divisor if numel else 0.0)
    return given


def _is_divided(node: Any) -> bool:
    return type(node).__name__.startswith("DivBackward") and number(node._saved_other) is not None


def _divided_by(node: Any) -> Any:
    """Return the node of the sum that a division divides."""
    return past_learned(past_multiples(past_views(node.next_functions[0][0])))


def refuse_groups(loss: Tensor, num_samples: int, known: tuple[int, ...] = ()) -> None:
    """Refuse a loss of means of groups of samples, and one whose divisor is no number of samples or targets.

    Args:
        loss: Of a rank.
        num_samples: Number of samples in its forward; 0 if unknown.
        known: Other numbers by which a mean may be divided.

    Raises:
        LossError: With what its graph shows.
    """
    if torch_compat.active_fake_mode() is not None or _has_class_weights(loss):
        return
    refuse_summed_rows(loss, num_samples)
    for term in {*terms_of(loss), past_views(loss.grad_fn)}:
        name = type(term).__name__
        if name.startswith("SumBackward") and means_groups(term, num_samples):
            raise unknown_mean(f"it adds up fewer means than this rank has samples, which are {num_samples}")
        divisor = constant_divisor(term)
        if divisor is None or divisor in (num_samples, *known) or _is_count(term, divisor):
            continue
        if is_python_number(term) or 1 < divisor < num_samples:
            raise unknown_mean(uncounted(divisor, "divides"))


def _has_class_weights(loss: Tensor) -> bool:
    """Return whether all terms of a loss divide by the class weights of its targets, as those of smoothed labels do."""
    terms = terms_of(loss)
    is_weighted = any(
        type(term).__name__.startswith("NllLoss") and term._saved_weight is not None and term._saved_reduction == 1
        for term in terms
    )
    return is_weighted and len(terms) > 1 and divisor_of_mean(loss) is not None


def _is_count(node: Any, divisor: float) -> bool:
    """Return whether a divisor may be the number of a sum's summands, or divides what is a mean already."""
    summed = _divided_by(node)
    terms = all_terms(summed) or [summed]
    if known_reduction(summed) == "mean" or all(bent_at(term) is not None for term in terms):
        return True
    counts = [float(each) for term in terms for each in _counts(past_multiples(term))[0]]
    return _is_among(divisor, [*counts, *_numbers(summed)]) or any(_is_beside(divisor, each) for each in counts)


def _numbers(summed: Any) -> list[float]:
    """Return numbers of terms, samples and elements, padding included, of what a sum adds up."""
    terms = all_terms(summed) or [summed]
    found: list[float] = [len(terms)] if len(terms) > 1 else []
    for term in terms:
        found += [*seen_counts(past_multiples(term)), _counts(past_multiples(term))[1]]
    return found


def _is_among(divisor: float, found: Sequence[float]) -> bool:
    """Return whether a divisor is one of some counts, beside small constants, and the bound 1 of a count of none."""
    return any(math.isclose(each, divisor, rel_tol=1e-6, abs_tol=1e-3) for each in found) or (
        divisor == 1 and any(each == 0 for each in found)
    )


def _is_beside(divisor: float, count: float) -> bool:
    """Return whether a divisor is a sum of weights, no whole number, and a whole one."""
    constant = divisor - count
    return constant > 0.5 and abs(count - round(count)) > 1e-3 and abs(constant - round(constant)) < 1e-6 * divisor


def _counts(node: Any) -> tuple[tuple[Tensor, ...], int]:
    """Return what may be the number of targets that a sum adds up, and its elements."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        own = getattr(node, "_saved_target", None)
        sizes = () if own is None else own.shape
        start = node
    else:
        start = node.next_functions[0][0]
    numel = math.prod(sizes)
    found = _masks(start, numel)
    return (() if found is None else tuple(found)), _with_padding(past_views(start), numel)


def _with_padding(node: Any, numel: int) -> int:
    """Return the elements that a selection was made from, or else `numel`."""
    name = type(node).__name__
    if name.startswith("MaskedSelect"):
        return int(node._saved_mask.numel())
    return math.prod(node._saved_self_sym_sizes) if name.startswith(("IndexBackward", "IndexSelect")) else numel


def _masks(node: Any, numel: int) -> list[Tensor] | None:
    """Return counts of a node's elements that are no padding; None if the node does not show them."""
    import torch

    node = past_multiples(past_views(node))
    name = type(node).__name__
    if node is None or name == "AccumulateGrad":
        return None
    if name.startswith(("IndexBackward", "MaskedSelect", "IndexSelect")):
        return [torch.tensor(numel)]
    if name.startswith("WhereBackward"):
        first, second = (operand for operand, _ in node.next_functions)
        if (first is None) == (second is None):
            return None
        condition = node._saved_condition
        return [(condition if second is None else ~condition).sum()]
    if name.startswith("MaskedFill"):
        return [(~node._saved_mask).sum()]
    if name.startswith("NllLoss"):
        valid = node._saved_target != node._saved_ignore_index
        return [valid.sum()]
    if name.startswith("BinaryCrossEntropy"):
        return None if node._saved_weight is None else _of_mask(node._saved_weight)
    if name.startswith("MulBackward"):
        return _of_product(node, numel)
    operands = [operand for operand, _ in node.next_functions if operand is not None]
    if name.startswith(("SumBackward", "MeanBackward")):
        numel = math.prod(node._saved_self_sym_sizes)
    if name.startswith(("AddBackward", "SubBackward", "RsubBackward")) and len(operands) == len(node.next_functions):
        several = [_masks(operand, numel) for operand in operands]
        return several[0] if several and all(each is not None for each in several) else None
    return _masks(operands[0], numel) if name.startswith(_ZERO_STAYS) and len(operands) == 1 else None


def _of_product(node: Any, numel: int) -> list[Tensor] | None:
    import torch

    found: list[Tensor] = []
    joint = _mask_of(node)
    if joint is not None:  # weights of targets that are no padding
        found += _of_mask(joint)
    saved = (node._saved_other, getattr(node, "_saved_self", None))  # beside each operand, the other one
    for (operand, _), other in zip(node.next_functions, saved, strict=False):
        if operand is None:
            continue
        whole = other.full_tensor() if hasattr(other, "full_tensor") else other
        is_constant = len([each for each, _ in node.next_functions if each is not None]) == 1
        if is_constant and isinstance(whole, torch.Tensor):
            found += _of_mask(whole)
        found += _masks(operand, numel) or []
    return found or None


def _mask_of(node: Any) -> Tensor | None:
    """Return by what every element of a node is multiplied, 0 where it is padding; None if nothing shows it."""
    node = past_multiples(past_views(node))
    name = type(node).__name__
    if name.startswith("NllLoss"):
        return (node._saved_target != node._saved_ignore_index).flatten()
    if not name.startswith("MulBackward"):
        return None
    (operand, _), *others = node.next_functions
    shape, weights = torch_compat.node_shape(node), node._saved_other
    if operand is None or any(each is not None for each, _ in others) or shape is None or weights is None:
        return None
    inside = _mask_of(operand)
    if inside is None or hasattr(weights, "full_tensor") or inside.numel() != math.prod(shape):
        return None
    return inside * weights.detach().expand(shape).flatten()


def _of_mask(mask: Tensor) -> list[Tensor]:
    mask = mask.detach()
    return [mask.sum(), mask.count_nonzero()]


def is_times_zero(loss: Tensor) -> bool:
    """Return whether a loss is something times 0, as loops write for a rank without targets: `logits.sum() * 0.0`."""
    return node_is_times_zero(loss.grad_fn)


def without_nothing(value: Tensor, loss: Tensor, divisor: Tensor) -> Tensor:
    """Return a mean as 0, without a gradient, where its divisor is 0: a mean over nothing is NaN, and weighs nothing.

    Args:
        value: Scalar, plain.
        loss: The mean as computed, of which it is the value.
        divisor: Scalar; 0 where the rank has no targets.
    """
    import torch

    settle_empty([*divisions_of(loss), *learned_products(loss.grad_fn)], divisor)
    return torch.where(divisor.to(value.device) == 0, torch.zeros_like(value), value)


def settle_empty(nodes: Sequence[Any], divisor: Tensor) -> None:
    """Let nothing divided by 0, and a learned number times that, have no gradient, where it would be NaN.

    Args:
        nodes: That divide, or multiply by what is learned.
        divisor: Scalar; 0 where the rank has no targets.
    """
    import torch

    def settled(gradient: Any) -> Any:
        if hasattr(gradient, "full_tensor"):  # of sharded parameters, which are compared with no plain tensor
            return gradient if float(divisor) else torch.zeros_like(gradient)
        return torch.where(divisor.to(gradient.device) == 0, torch.zeros_like(gradient), gradient)

    def zeros(gradients: Any, _: Any) -> Any:
        return tuple(None if each is None else settled(each) for each in gradients)

    for node in {*nodes}:
        node.register_hook(zeros)
