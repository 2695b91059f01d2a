"""The part of a composition that saves and loads what it has trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.composition.assembling import Assembled
from composer3d.composition.run_state.persistence import Persistence
from composer3d.composition.run_state.rank_state import RankState
from composer3d.errors import CheckpointError, StepError
from composer3d.observation.lost_peers import lost_a_peer
from composer3d.step.buffers import average_buffers, share_held_buffers
from composer3d.step.evaluation import reshard_units

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from composer3d.step.engine import StepEngine

__all__ = ["SavedRun"]

log = logging.getLogger(__name__)


class SavedRun:
    """The part of a composition that keeps its state; `Composition` is one."""

    averages_buffers: bool
    _compared: int  # the step before which replicas were last compared outside of steps
    _assembled: Assembled
    _engine: StepEngine
    _persistence: Persistence
    _optimizer: torch.optim.Optimizer | None

    if TYPE_CHECKING:
        explaining: Callable[[str], contextlib.AbstractContextManager[None]]

    def save(self, path: str | Path, *, asynchronous: bool = False, deferred: bool = False) -> None:
        """Save parameters, buffers, the optimizer, plugins and what was attached, atomically.

        Args:
            path: The folder of this checkpoint, which appears whole or not at all; of what is there a checkpoint alone
                is replaced.
            asynchronous: Copy to host memory now and write in a thread; the next save, and `close`, wait for it.
            deferred: Copy parameters and the optimizer's state during the next forward and backward instead; the
                optimizer's step waits for what is left. For loops in which nothing else writes to them.

        A warning says where gradients of an accumulation are pending, which are not saved.

        Raises:
            CheckpointError: On all ranks, if any of them could not write.
            StepError: Replicas hold other values, or the last load failed in its middle; nothing is written.
        """
        self._engine.guard.refuse_half_loaded("run.save")
        with self.explaining("save"):
            self._warn_of_gradients()
            self._compare_replicas("run.save")
            self._settle_buffers()
            self._persistence.save(Path(path), self._optimizer, asynchronous=asynchronous, deferred=deferred)

    def _warn_of_gradients(self) -> None:
        """Warn of gradients that no optimizer step has used: nothing saves them."""
        engine = self._engine
        num = max(engine.own_steps.num_backwards * engine.own_steps.is_open, engine.loss_totals.pending)
        if num and self._assembled.context.rank == 0:
            log.warning(
                "run.save was called inside a step, after %d of its backwards and before optimizer.step(): their "
                "gradients are not saved, and a run that loads this goes on without them; save after the optimizer's "
                "step (under run.accumulate: if run.sync_gradients)",
                num,
            )

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote, in this layout, whatever the layout was that wrote it.

        Args:
            path: A checkpoint, or a folder of them or of a run, of which the newest complete one is loaded.

        Raises:
            CheckpointError: It is missing, half written, unsafe, or of another model. Where it is damaged inside,
                steps and saves are refused from then on, until a load succeeds.
        """
        guard = self._engine.guard
        with self.explaining("load"):
            try:
                with self._engine.bypassed():
                    self._persistence.load(Path(path), self._optimizer)
            except CheckpointError as error:
                if guard.half_loaded is None:
                    raise
                told = "what was read before it is loaded: steps and saves are refused until run.load succeeds"
                raise CheckpointError(f"{error}; {told}") from error
            guard.half_loaded = None
            self._compared = self._engine.own_steps.next
            self.parameters_changed()

    def _compare_replicas(self, at: str) -> None:
        """Compare replicated parameters; `verify` lets a fault run on, and reports its effects."""
        context, engine = self._assembled.context, self._engine
        if context.purpose == "run":
            reshard_units(context.parts)
            engine.guard.compare_replicas(engine.own_steps.next, engine.loop.replicated, at=at)
        self._compared = engine.own_steps.next

    def _compare_at_the_end(self) -> None:
        """Compare replicated parameters, if there were steps since: what a loop saves by itself is one replica's.

        A peer that is gone is no fault of this rank's, which has come to its end.
        """
        if self._engine.own_steps.next == self._compared:
            return
        try:
            self._compare_replicas("run.close")
        except RuntimeError as error:
            if not lost_a_peer(error):
                raise
            log.debug("replicas are not compared at the end: %s", error)

    @property
    def rank_state(self) -> RankState:
        """State of the run on this rank, to be kept in the memory or on the disk of its machine."""
        return RankState(self._persistence, self._optimizer, self._engine.bypassed, self.parameters_changed)

    def sync_buffers(self) -> None:
        """Average the buffers that training changed, as batch-norm's statistics, before they are evaluated or saved.

        Those inside of experts of a list are those of the ranks that hold the expert.
        `save`, `evaluate` and `full_state_dict` do so by themselves, unless `averages_buffers` is set to False; a loop
        that evaluates with a forward of its own calls it before.
        Collectives: one all-reduce an axis of other samples or positions; over ep one more.
        """
        with self._engine.explaining():
            average_buffers(self._assembled.context)

    def _average_buffers(self) -> None:
        if self.averages_buffers:
            self.sync_buffers()

    def _settle_buffers(self) -> None:
        """Let the first rank have the model's buffers: averaged, where the loop does not do that by itself."""
        if self.averages_buffers:
            self.sync_buffers()
        else:
            share_held_buffers(self._assembled.context)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers of the whole model on the CPU of the first rank; no others there.

        For a file that torch.load reads: every rank calls it, and the first one saves what it returns.
        Memory: there the whole model, elsewhere one gathered tensor. Collectives: an all-gather a sharded tensor.

        Raises:
            StepError: A pipeline's ranks hold other tensors each, replicas other values, or the last load failed in its
                middle.
        """
        self._engine.guard.refuse_half_loaded("run.full_state_dict")
        if self._assembled.has_schedule:
            raise StepError("no rank of a pipeline has all tensors; write run.save(...), and composer3d export")
        with self.explaining("full_state_dict"):
            self._compare_replicas("run.full_state_dict")
            self._settle_buffers()
            return self._persistence.full_state_dict()

    def parameters_changed(self) -> None:
        """Let plugins recompute values derived from parameters, after a loop has changed these between steps.

        Parameters that a forward without a backward has gathered are resharded, too. `load` does so by itself.
        Collectives: those of the plugins' actions.

        Raises:
            StepError: Inside a step.
        """
        reshard_units(self._assembled.context.parts)
        with self._engine.explaining():
            self._engine.parameters_loaded()
