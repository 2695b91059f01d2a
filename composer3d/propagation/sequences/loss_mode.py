"""Dry run of a loss on a sharded sequence: whether the losses of ranks' own positions add up to that of all.

They do where the loss of every position is computed of that position alone, and all are added up, or averaged, at the
end. The loss function is run on meta with its arguments marked: what would have to be gathered, or indexed by position,
relates positions. Totals are then added to each other and divided by each other, and by nothing that is the same on
every rank, as the number of samples is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from composer3d import torch_compat
from composer3d.propagation.functions.function_dims import CASTS, OBJECT, SIZES, name_of
from composer3d.propagation.functions.whole_operands import PAIRED, is_in_place
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.sequence_mode import SequencePropagation
from composer3d.propagation.shards import PropagationError

__all__ = ["LossPropagation", "Relation"]

SUM, MEAN, RATIO = "sum", "mean", "ratio"
# Losses of torch that reduce what `reduction="none"` returns.
REDUCED = frozenset(
    "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss "
    "huber_loss kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss".split()
)
SUMS = frozenset({"sum", "nansum", "count_nonzero"})
MEANS = frozenset({"mean", "nanmean"})
# Views and copies of totals.
KEPT = frozenset({*CASTS, "reshape", "view", "squeeze", "unsqueeze", "detach", "neg", "__neg__", "negative"})
ADDED = frozenset("add sub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ add_ sub_".split())
TIMES = frozenset("mul __mul__ __rmul__ __imul__ mul_ multiply".split())
OVER = frozenset("div __truediv__ __itruediv__ div_ divide true_divide".split())
CLAMPS = frozenset("clamp clamp_ clamp_min clamp_min_ clip max maximum".split())
NUMBERS = frozenset("item __int__ __float__ __index__ tolist".split())
ASKED = frozenset({*OBJECT, *SIZES, "dim", "ndim"})


class Relation(PropagationError):
    """A loss relates positions; the message says by which function."""


class LossPropagation(SequencePropagation):
    """Runs a loss function on meta, and follows totals over positions.

    Args:
        degree: Ranks along the axis.
        rules: Local lengths; what they are asked to gather, index or attend to raises `Relation`.
        axis: The mesh axis.

    Attributes:
        divisors: Numbers by which sums are divided, in order: each has to grow as the number of positions does.
        factors: Numbers that go into losses of positions otherwise: none of them may.
    """

    def __init__(self, degree: int, *, rules: SequenceRules, axis: str = "cp") -> None:
        super().__init__(degree, "the loss", rules=rules, axis=axis)
        self.divisors: list[float] = []
        self.factors: list[float] = []
        self._length = 0
        self._totals = WeakTensorKeyDictionary()

    def kind_of(self, value: Any) -> str | None:
        """Return what a value is a total of: `sum`, `mean`, `ratio`, or None where it is no total."""
        return self._totals.get(value) if isinstance(value, Tensor) else None

    def run(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run one function.

        Raises:
            Relation: It relates positions.
        """
        name = name_of(func)
        args, options = torch_compat.tree_map(self._on_meta, list(args)), torch_compat.tree_map(self._on_meta, options)
        leaves = [leaf for leaf in torch_compat.tree_leaves([args, options]) if isinstance(leaf, Tensor)]
        specs = self._specs_in(args, options)
        totals = [kind for leaf in leaves if (kind := self.kind_of(leaf)) is not None]
        if specs:
            self._length = max(self._length, *(max(spec.placed.parts) for spec in specs))
        if totals:
            if specs or not args:
                raise Relation(f"{name} of a total over positions and of positions")
            return self._of_totals(func, name, args, options)
        if not specs:
            return super().run(func, args, options)
        if name in ("__bool__", *NUMBERS):
            raise Relation(f"{name} of positions")
        if name in ("__getitem__", "masked_select", "__setitem__") and self._is_mask(args):
            return self._masked(name, args)
        if name in PAIRED | CLAMPS:
            self.factors += [float(each) for each in [*args, *options.values()] if isinstance(each, int | float)]
        if name in REDUCED and options.get("reduction", "mean") != "none":
            return self._reduced(func, name, args, options)
        return super().run(func, args, options)

    def watch(self, loss: Callable[[], Any]) -> None:
        """Run a loss function.

        Raises:
            Relation: Losses of ranks' own positions do not add up to what it returns.
        """
        with self:
            value = loss()
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        total, count = value if is_pair else (value, None)
        if not isinstance(total, Tensor) and hasattr(total, "auxiliary"):
            total, count, auxiliary = total.sum, total.count, total.auxiliary
            if self.kind_of(auxiliary) == SUM or self._spec_of(auxiliary) is not None:
                raise Relation("its auxiliary loss is a sum over positions")
        if self.kind_of(total) is None:
            raise Relation("what it returns is no total over positions")
        if isinstance(count, int | float):
            self.divisors.append(float(count))
        elif count is not None and self.kind_of(count) != SUM:
            raise Relation("its count is no total over positions")

    # ---- totals ------------------------------------------------------------------------------------------------------

    def _total(self, result: Tensor, kind: str) -> Tensor:
        self._totals[result] = kind
        return result

    def _on_whole(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        if name not in SUMS | MEANS or is_in_place(name):
            raise Relation(name)
        with self._within():
            result = func(*args, **options)
        if name in MEANS and result.ndim:
            raise Relation(f"{name} of the positions of each sample")
        return self._total(result, SUM if name in SUMS else MEAN)

    def _gathered(
        self, name: str, args: Sequence[Any], options: dict[str, Any], *, is_summed: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        raise Relation(name)

    def _reduced(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Tensor:
        """Return the total of a loss of torch, whose loss of each position has one."""
        older = [options.get(each) for each in ("size_average", "reduce")]
        if len(args) > 2 + (name in ("cross_entropy", "nll_loss")) or any(each is not None for each in older):
            raise Relation(f"{name} with arguments by place")
        each = self.run(func, args, {**options, "reduction": "none"})
        if self._spec_of(each) is None:
            raise Relation(name)
        with self._within():
            kind = SUM if options.get("reduction", "mean") == "sum" else MEAN
            return self._total(each.sum(), kind)

    def _of_totals(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a function of totals, and of what is whole."""
        if name in ASKED:
            return func(*args, **options)
        first = args[0]
        if name in NUMBERS and self.kind_of(first) == SUM and not first.ndim:
            return float(self._length) if name == "__float__" else self._length
        given = args[:2]
        kinds = [self.kind_of(each) for each in given]
        kind = self._kind(name, kinds, given, first)
        if kind is None:
            raise Relation(f"{name} of a total over positions")
        with self._within():
            result = func(*args, **options)
        return self._total(result, kind)

    def _kind(self, name: str, kinds: Sequence[str | None], given: Sequence[Any], first: Any) -> str | None:
        """Return what a function of totals is a total of; None where ranks' results do not add up to it."""
        known = {kind for kind in kinds if kind is not None}
        kind = known.copy().pop() if len(known) == 1 else None
        if name in KEPT:
            return kind
        if name in SUMS:
            return kind if kind == SUM or not first.ndim else None
        if name in ADDED:
            # What is whole is added as it is to any loss: a term of parameters, or one that the model returned.
            return kind
        if name in TIMES:
            self.factors += [float(each) for each in given if isinstance(each, int | float)]
            return kind if None in kinds else None
        if name in CLAMPS:
            return kind if not first.ndim and not any(isinstance(each, Tensor) for each in given[1:]) else None
        if name in OVER and len(kinds) == 2 and kinds[0] is not None:
            if kinds == [SUM, SUM]:
                # Of sums that both have gradients a mean of ratios is none of the whole.
                return RATIO if not first.ndim and not given[1].requires_grad else None
            if kinds[1] is None and isinstance(given[1], int | float):
                (self.divisors if kind == SUM else self.factors).append(float(given[1]))
                return kind if not first.ndim else None
        return None

    # ---- positions that a mask picks ---------------------------------------------------------------------------------

    def _is_mask(self, args: Sequence[Any]) -> bool:
        """Return whether a mask of the same positions, and of all dims up to theirs, picks some of them."""
        spec, index = self._spec_of(args[0]), args[1]
        mask = self._spec_of(index)
        if spec is None or mask is None or mask.shadow.dtype is not torch.bool:
            return False
        return mask.placed == spec.placed and mask.shadow.shape == spec.shadow.shape[: mask.shadow.ndim]

    def _masked(self, name: str, args: Sequence[Any]) -> Any:
        """Return what a mask picks as if it picked everything: each rank has those of its own positions."""
        x, mask = args[:2]
        if name == "__setitem__":
            if isinstance(args[2], Tensor) and (args[2].ndim or self._spec_of(args[2]) is not None):
                raise Relation(name)
            return None
        last = mask.ndim - 1 if name == "__getitem__" else x.ndim - 1
        return x if not last else super().run(torch.flatten, [x, 0, last], {})

    def _on_meta(self, value: Any) -> Any:
        """Return a tensor on meta in the place of one that the loss keeps, such as weights of classes."""
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        with torch_compat.without_torch_functions():
            return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
