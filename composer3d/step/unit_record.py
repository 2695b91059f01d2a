"""Units that a rank did not call, and parameters that it did not use, in a step."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from composer3d import torch_compat
from composer3d.mesh import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from composer3d.context import RunContext
    from composer3d.step.guard import Guard

__all__ = ["UnitRecord"]

_BITS = (1 << 52) - 1


class UnitRecord:
    """What units of data parallelism send in a step, alike on all ranks.

    Parameters that a rank has not used, as those of an expert that none of its rows went to, take part in reductions
    with zeros. What no rank has used is left without a gradient, as on one device: an optimizer leaves it alone, its
    decay too. Ranks find out in the sums that end a backward that some parameters were not used on some rank, and
    whether they gathered and reduced the same units in the same order.

    Args:
        context: Complete.
        guard: Compares ranks.
    """

    def __init__(self, context: RunContext, guard: Guard) -> None:
        self._context, self._guard = context, guard
        self._units = [torch_compat.watch_units(part.module) for part in context.parts]
        self._is_partial = False

    def begin(self) -> None:
        """Forget the last step."""
        self._is_partial = False
        for units in self._units:
            units.begin()

    def numbers(self) -> list[float]:
        """Return what ranks add up after a step's last backward."""
        unused = sum(not used for units in self._units for _, used in units.trained())
        sent = tuple(itertools.chain.from_iterable((-1, *units.sent) for units in self._units))
        return [float(unused), *self._guard.placed(hash(sent) & _BITS)]

    def settle(self, sums: Sequence[float], step: int) -> None:
        """Take what `numbers` of all ranks add up to.

        Raises:
            StepError: Ranks called different units.
        """
        self._is_partial = bool(sums[0])
        if self._guard.compares:
            self._guard.compare_units(sums[1:], self._describe, step)

    def _describe(self) -> list[str]:
        return [line for units in self._units for line in units.describe()]

    def drop_unused(self) -> None:
        """Take away the gradients of parameters that no rank has used in this step.

        Collectives: where there are unused ones on some rank, one all-reduce an axis of one byte a parameter.
        """
        import torch
        import torch.distributed as dist

        if not self._is_partial:
            return
        trained = [pair for units in self._units for pair in units.trained()]
        used = [used for _, used in trained]
        if trained:
            flags = torch.tensor(used, dtype=torch.uint8, device=self._context.device)
            for axis in self._context.layout.names(Role.BATCH, Role.SEQUENCE, Role.TENSOR):
                if self._context.degrees[axis] > 1:
                    with self._context.span("all_reduce", group="unused", axis=axis, bytes=flags.nbytes):
                        group = self._context.mesh[axis].get_group()
                        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            if torch_compat.active_fake_mode() is None:  # fake tensors have no values, and their ranks are alike
                used = [bool(flag) for flag in flags.tolist()]
        for (parameter, _), is_used in zip(trained, used, strict=True):
            if not is_used:
                parameter.grad = None
