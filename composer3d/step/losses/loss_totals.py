"""Loss accounting of a step: sums, counts, and the divisor that every micro-batch had."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import LossError
from composer3d.interfaces import Loss
from composer3d.processes.json_exchange import all_gather_json
from composer3d.step import control_numbers, gradients
from composer3d.step.losses.divided_sums import DividedSum
from composer3d.step.losses.loss import DividedLoss, Nothing
from composer3d.step.losses.loss_graph import unknown_mean, unknown_reduction
from composer3d.step.losses.total_divisors import Part, added_constants, total_divisor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LossTotals"]

_NUMBERS = 6
# Of the loss; what ranks along tp compute alike differs by roundings at most, which are smaller in float64.
_SPREAD, _SPREAD_OF_DOUBLES = 1e-2, 1e-9


@dataclass(frozen=True, kw_only=True)
class _Entry:
    loss: Tensor
    count: Tensor | int | float
    auxiliary: Tensor | None
    divided: DividedSum | None
    factor: float
    is_nothing: bool
    constant: float | None

    def part(self) -> Part:
        assert self.divided is not None
        constant = None if self.constant is None else self.constant / self.factor
        return replace(self.divided.part(self.factor), constant=constant)


class LossTotals:
    """Loss sums and counts of one step.

    Losses are divided by the valid tokens of the step's first batch before backward, because low precision rounds
    differently afterwards (FP8: 5 % between the two). If the step then sees more batches, or losses report other counts
    than their targets, `correction` is the factor that gradients still lack.

    Args:
        averages: Product of the degrees over which data-parallel plugins average gradients.
        contributes: Whether this rank's losses count; ranks along tp compute the same loss.
        group: Process group of the ranks of one global batch.
        device: For the reduced numbers.
        spread: Weight of this rank's losses in a sum that is zero if ranks along tp compute the same ones; 0 where that
            is not looked at.
    """

    def __init__(
        self, *, averages: int, contributes: bool, group: Any, device: torch.device, spread: float = 0.0
    ) -> None:
        self.averages, self._contributes, self._spread = averages, contributes, spread
        self._group, self._device = group, device
        # This rank's index among those that compute the same losses, and their number; set by every batch.
        self.copy = 0, 1
        self.clear()

    def clear(self) -> None:
        """Drop all losses and counts of the last step."""
        self.divisor: int | None = None
        self.auxiliary = 0.0
        self.added: list[float] = []
        self._count = 0.0
        self._entries: list[_Entry] = []

    @property
    def count(self) -> float:
        """Targets that losses with a gradient have reported so far in this step, of all ranks."""
        return self._count

    def mark(self) -> Callable[[], None]:
        """Return what drops the losses and counts that follow."""
        kept = self.divisor, self.auxiliary, self._count

        def undo() -> None:
            self.divisor, self.auxiliary, self._count = kept
            self._entries.clear()

        return undo

    def announce(self, count: int) -> None:
        """Set the divisor from the global batch's count of valid tokens, in the step's first batch alone."""
        if self.divisor is None:
            self.divisor = max(count, 1)

    def scaled(self, loss: Loss) -> Tensor:
        """Record a micro-batch's loss and return the scaled scalar whose backward runs."""
        assert self.divisor is not None, "announce comes first"
        return self.record(loss) * (self.averages / self.divisor / self.copy[1])

    def record(self, loss: Loss) -> Tensor:
        """Record a micro-batch's loss and return its objective, not divided by anything."""
        auxiliary = None if loss.auxiliary is None else loss.auxiliary * loss.count
        self._entries.append(
            _Entry(
                loss=loss.sum.detach(),
                count=loss.count,
                auxiliary=None if auxiliary is None else auxiliary.detach(),
                divided=loss.divided if isinstance(loss, DividedLoss) else None,
                factor=loss.factor if isinstance(loss, DividedLoss) else 1.0,
                is_nothing=isinstance(loss, Nothing),
                constant=loss.constant if isinstance(loss, DividedLoss) else 0.0,
            )
        )
        return loss.sum if auxiliary is None else loss.sum + auxiliary

    def forget(self) -> None:
        """Drop the records since the last `settle`."""
        self._entries.clear()

    @property
    def pending(self) -> int:
        """Number of losses recorded since the last `settle`."""
        return len(self._entries)

    def settle(
        self, num_microbatches: int, *, has_gradient: bool = True, also: Sequence[float] = (), own: bool = False
    ) -> tuple[Tensor, float]:
        """Return the global mean of the losses since the last call, and their count, on every rank.

        The first pipeline step calls the loss once more than there are micro-batches, to infer shapes; that call comes
        first, so only the last `num_microbatches` entries count.
        Collectives: one all-reduce of six numbers, and of those in `also`. Where a loss divides a sum by another number
        than what it is seen to add up, two all-gathers of these.

        Args:
            num_microbatches: On this rank.
            has_gradient: Losses of an evaluation have none, so they say nothing about the step's count.
            also: Other numbers, whose sums over all ranks are then in `added`.
            own: Whether a loop has computed the losses of what it called itself, a shard of a block's inside maybe.

        Raises:
            LossError: Losses differ along tp, or what a mean was divided by has two readings.
        """
        import torch

        entries, self._entries = self._entries[-num_microbatches:], []
        # The fourth informs ranks without losses (other stages) that the loss is float64.
        compares = self._spread != 0.0 and (own or has_gradient)
        numbers = [0.0] * _NUMBERS + list(also) + [0.0] * compares
        own_entries = entries if self._contributes and not self.copy[0] else []
        terms = [(-1, entry.loss, self._spread) for entry in entries] if compares else []
        terms += _add_up(own_entries, numbers)
        parts = [entry.part() for entry in own_entries if entry.divided is not None]
        numbers[4] = float(sum(not part.is_exact for part in parts))
        total = _added(numbers, terms, self._device)
        control_numbers.all_reduce(total, group=self._group)
        added_up, count, auxiliary_sum, is_double, is_divided, num_nothing, *others = total.tolist()
        self.added = others[: len(also)]
        if compares and abs(others[-1]) > (_SPREAD_OF_DOUBLES if is_double else _SPREAD) * abs(added_up):
            raise LossError(
                "ranks of tensor parallelism computed other losses of the same batch: they differ by "
                f"{abs(others[-1]):.3g}, of {abs(added_up):.3g}. What a loop or a loss function calls inside of a "
                "block, or reads there, is a rank's shard: call the model, or its blocks as a whole, and compute the "
                "loss of what these return"
            )
        if is_divided:
            gathered = self._gathered(own_entries, parts)
            count = total_divisor(gathered, unknown_mean if own else unknown_reduction)
            added_up += added_constants(gathered, count)
        if has_gradient:
            self._count += count
            self.auxiliary = auxiliary_sum / count if count else 0.0
        divisor = 1.0 if num_nothing and not count else count
        mean = added_up / divisor if divisor else added_up * math.inf  # as torch divides
        # By way of float64, since `full` refuses what its dtype has no number for.
        loss = torch.full((), mean, dtype=torch.float64, device=self._device)
        return loss if is_double else loss.float(), count

    def _gathered(self, entries: Sequence[_Entry], parts: Sequence[Part]) -> list[Part]:
        """Return the parts of all ranks: what each divided, or else counted."""
        counted = [float(entry.count) for entry in entries if entry.divided is None and not entry.is_nothing]
        own = [astuple(part) for part in (*parts, *(Part(divisor=count, count=count) for count in counted))]
        names = [field.name for field in fields(Part)]
        everything = all_gather_json(own, group=self._group)
        return [Part(**dict(zip(names, each, strict=True))) for rank in everything for each in rank]

    @property
    def correction(self) -> float:
        """Factor by which all gradients have to be multiplied."""
        return 1.0 if not self._count or self.divisor is None else self.divisor / self._count


def _add_up(entries: Sequence[_Entry], numbers: list[float]) -> list[tuple[int, Tensor, float]]:
    """Add what losses say in Python's numbers to `numbers`; return what they say in tensors, as `_added` takes it."""
    import torch

    terms: list[tuple[int, Tensor, float]] = []
    for entry in entries:
        terms.append((0, entry.loss, 1.0))
        if isinstance(entry.count, torch.Tensor):
            terms.append((1, entry.count, 1.0))
        else:
            numbers[1] += entry.count
        if entry.auxiliary is not None:
            terms.append((2, entry.auxiliary, 1.0))
        numbers[3] += entry.loss.dtype is torch.float64
        numbers[5] += entry.is_nothing
    return terms


def _added(numbers: list[float], terms: Sequence[tuple[int, Tensor, float]], device: torch.device) -> Tensor:
    """Return numbers in float64, to which scalars times a factor are added at their places.

    What lies in host memory is read at once: a number of Python's costs a tenth of a tensor's operators.
    """
    import torch

    found = [(place, gradients.local(scalar), factor) for place, scalar, factor in terms]
    is_fake = torch_compat.active_fake_mode() is not None
    if is_fake or any([type(scalar) is not torch.Tensor or scalar.device.type != "cpu" for _, scalar, _ in found]):
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        for place, scalar, factor in found:
            total[place] += scalar.to(device) * factor
        return total
    for place, scalar, factor in found:
        numbers[place] += scalar.item() * factor
    return control_numbers.host_vector(numbers, dtype=torch.float64).to(device)
