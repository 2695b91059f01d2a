"""Steps of several micro-batches that a loop runs one by one, written as for one device."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError

if TYPE_CHECKING:
    import torch

__all__ = ["AccumulatedSteps"]


class AccumulatedSteps:
    """Counts a loop's micro-batches: in all but the last of a group the loop's optimizer, and schedulers, stand still.

    Attributes:
        is_last: Whether gradients are complete after the micro-batch that the loop began last.
        has_ended: Whether the batch that the loop's loader yielded last is the last one of its epoch.
    """

    def __init__(self) -> None:
        self.is_last = True
        self.has_ended = False
        self._num = 0
        self._rates: list[Any] = []
        self._held: list[Any] = []

    @contextlib.contextmanager
    def microbatch(
        self, num: int, *, last: bool, optimizer: torch.optim.Optimizer | None, attached: Iterable[Any]
    ) -> Iterator[None]:
        """Begin a micro-batch; see `Composition.accumulate`.

        Args:
            num: Micro-batches of a group.
            last: Whether it is the last one of its group, however many there were.
            optimizer: The loop's.
            attached: What the loop saves with its checkpoints, schedulers among it.
        """
        if num < 1:
            raise StepError(f"run.accumulate({num}): a step has at least one micro-batch")
        rates = [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]
        if self._num and rates != self._rates:
            raise StepError(
                "the learning rate changed between the micro-batches of a step; write "
                'run.attach("lr_scheduler", lr_scheduler) once, and its step waits for the optimizer\'s, or '
                "if run.sync_gradients: lr_scheduler.step()"
            )
        self.release()
        self._num += 1
        self.is_last = last or self.has_ended or self._num >= num
        if self.is_last:
            self._num = 0
        else:
            self._rates = rates
            self._hold(optimizer, attached)
        yield

    def _hold(self, optimizer: torch.optim.Optimizer | None, attached: Iterable[Any]) -> None:
        from torch.optim.lr_scheduler import LRScheduler

        for thing in attached:
            if isinstance(thing, LRScheduler) and thing.optimizer is optimizer:
                vars(thing)["step"] = lambda *args, **kwargs: None
                self._held.append(thing)

    def release(self) -> None:
        """Let schedulers step again."""
        for thing in self._held:
            vars(thing).pop("step", None)
        self._held.clear()

    def close(self) -> None:
        """End, and warn of micro-batches that no optimizer step has used."""
        self.release()
        if self._num:
            logging.getLogger(__name__).warning(
                "the gradients of %d micro-batches were not used: the loop ended inside a step; tell run.accumulate "
                "which is the last, with last=..., or read batches from run.loader(...), which knows",
                self._num,
            )
