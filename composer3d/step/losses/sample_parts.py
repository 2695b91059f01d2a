"""Means over parts of a rank's samples that a loss adds up: `sum(loss(part) for part in x.chunk(n)) / n`.

One device has other parts: as many of more samples, or more of as many. Where all parts have as many targets the mean
over all of them is the same in every reading; else the graph does not say which of these is meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.step.losses.loss_factors import past_views
from composer3d.step.losses.loss_graph import divisors_of_terms, past_factors, terms_of
from composer3d.step.losses.sample_mixing import base

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SampleParts", "refuse_summed_rows", "rows_error", "sample_parts"]

_LOOKED_AT = 64  # nodes before a term
_SHOWN = 4
_WHAT_TO_WRITE = (
    "write run.backward((torch.stack(losses).sum(), len(losses))), or return that pair from loss_fn, for the mean over "
    'the samples of all ranks; or state what it is: run.backward(loss, reduction="sum") adds ranks\' up, '
    'reduction="mean" averages them'
)


@dataclass(frozen=True, kw_only=True)
class SampleParts:
    """Parts of a rank's samples, of which a loss adds up the means.

    Args:
        num: Of the parts.
        are_rows: Whether each is a single sample, or a single entry of another first dim.
        is_divided: Whether their sum is divided by their number.
        divisors: Of the means; none that are unknown.
    """

    num: int
    are_rows: bool
    is_divided: bool
    divisors: tuple[float, ...]

    @property
    def is_uneven(self) -> bool:
        """Whether some means are over other numbers of targets than others."""
        return any(not math.isclose(each, self.divisors[0], rel_tol=1e-6) for each in self.divisors)

    @property
    def shown(self) -> str:
        """The numbers of targets, for messages."""
        numbers = [f"{each:g}" for each in self.divisors[:_SHOWN]]
        return ", ".join(numbers) + ", ..." * (len(self.divisors) > _SHOWN)


def sample_parts(loss: Tensor, num_samples: int, num_parts: int = 0) -> SampleParts | None:
    """Return the parts of a rank's samples whose means a loss adds up; None where its terms are no such parts.

    Args:
        loss: Scalar with a graph.
        num_samples: Of the forward; 0 if unknown.
        num_parts: Forwards of parts of one batch of which it was computed.
    """
    terms = terms_of(loss)
    if len(terms) < 2 or torch_compat.active_fake_mode() is not None:
        return None
    found = [_slice_of(term, num_samples) for term in terms]
    slices = {each for each in found if each is not None}
    is_sliced = None not in found and len({whole for whole, _, _ in slices}) == 1 and len(slices) > 1
    if not is_sliced and num_parts != len(terms):
        return None
    factor, node = past_factors(past_views(loss.grad_fn))
    divisors = [float(each) for each in divisors_of_terms(loss)]
    return SampleParts(
        num=len(slices) if is_sliced else num_parts,
        are_rows=is_sliced and all(is_row for _, _, is_row in slices) and len(slices) == num_samples,
        is_divided=base(node) == "Mean" or math.isclose(factor * len(slices), 1.0, rel_tol=1e-6),
        divisors=tuple(divisors) if len(divisors) == len(terms) else (),
    )


def rows_error(num: int, divisors: str) -> LossError:
    """Return the error of means over single samples that ranks' numbers of targets would weigh.

    Args:
        num: Of the means.
        divisors: Numbers of targets that differ.
    """
    return LossError(
        f"the loss is the mean of {num} means, each over a single entry of the first dim, of other numbers of targets "
        f"({divisors}): whether these are samples, of which all ranks together have more, or positions, of which they "
        "have as many, its graph does not show; " + _WHAT_TO_WRITE
    )


def refuse_summed_rows(loss: Tensor, num_samples: int) -> None:
    """Refuse a sum of means over single samples: one device has as many as all ranks, and a mean as many as each.

    Args:
        loss: Scalar with a graph.
        num_samples: Of the forward; 0 if unknown.

    Raises:
        LossError: With what to write.
    """
    parts = sample_parts(loss, num_samples)
    if parts is not None and parts.are_rows and parts.divisors and not parts.is_divided:  # else sums
        raise LossError(
            f"the loss adds up {parts.num} means, each over a single entry of the first dim: whether these are "
            "samples, of which all ranks together have more, or positions, of which they have as many, its graph does "
            "not show; " + _WHAT_TO_WRITE
        )


def _slice_of(term: Any, num_samples: int) -> tuple[Any, int, bool] | None:
    """Return of which node's rows a term is made, of which of them, and whether of a single one; None: of no part."""
    pending, seen, found = [term], {term}, set[tuple[Any, int, bool]]()
    while pending and len(seen) < _LOOKED_AT:
        for node, output in pending.pop(0).next_functions:
            if node is None or node in seen:
                continue
            sliced = _sliced(node, output, num_samples)
            if sliced is not None:
                found.add(sliced)
            else:
                seen.add(node)
                pending.append(node)
    return found.pop() if len(found) == 1 else None


def _sliced(node: Any, output: int, num_samples: int) -> tuple[Any, int, bool] | None:
    name, dim = base(node), getattr(node, "_saved_dim", None)
    if name not in ("Select", "Slice", "Split", "SplitWithSizes", "Unbind") or dim != 0:
        return None
    whole, _ = node.next_functions[0]
    sizes: Sequence[int] | None = getattr(node, "_saved_self_sym_sizes", None) or torch_compat.node_shape(whole)
    if not sizes or (rows := sizes[0]) < 2 or (rows % num_samples if num_samples > 1 else name in ("Select", "Unbind")):
        return None
    if name in ("Unbind", "Select"):
        return whole, output if name == "Unbind" else int(node._saved_index), True
    if name == "Slice":
        first, last = int(node._saved_start), min(int(node._saved_end), rows)
        return None if last - first >= rows else (whole, first, last - first == 1 and rows > 2)
    size = node._saved_split_size if name == "Split" else node._saved_split_sizes[output]
    return None if size >= rows else (whole, output, size == 1 and rows > 2)
