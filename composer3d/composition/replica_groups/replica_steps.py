"""Steps of a global batch that groups of ranks share while some of them come and go.

Every group is given the whole global batch, and computes a piece of it: that of its place among the groups that take
part. Gradients are then averaged over those, and a vote decides in one place whether all of them have the result; if
not, because a group was lost, those that are left divide the same batch anew. So a step is that of one device whoever
takes part, and data order, dropout and learning rates, which are functions of the step, stay what they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from composer3d.composition.replica_groups.group_averages import Averaged, Before, average_over_groups
from composer3d.composition.replica_groups.recovery import give_state, take_state
from composer3d.composition.replica_groups.replayed_pieces import Replays, digest_of
from composer3d.errors import BatchError, ReplicaError, StepError
from composer3d.mesh import Role
from composer3d.replicas import (
    ATTEMPT,
    GROUP,
    NOTHING,
    TOKEN,
    Exchange,
    ExchangeError,
    Quorum,
    QuorumClient,
    address_of_quorum,
)
from composer3d.step.gradients import local
from composer3d.step.microbatches import map_tensors, num_samples

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.composition.assembling import Assembled
    from composer3d.composition.run_state.persistence import Persistence
    from composer3d.replicas import ReplicaPolicy
    from composer3d.step.step_state import StepState

__all__ = ["ReplicaSteps", "steps_of_replicas"]

_MOST_ATTEMPTS = 20  # of a step without a group being lost
_BEATS = 5  # signs of life within the time after which a group is silent

log = logging.getLogger(__name__)


class _Spare(StepError):
    """This group takes no part until another one is lost."""


class ReplicaSteps:
    """The steps of one group among several.

    Args:
        assembled: The composition of this group.
        persistence: Of its state.
        optimizer: Returns the optimizer, once it is made.
        policy: By which groups are kept together.
        address: Where who takes part is asked.
        setup: Fingerprint of the plan.

    Memory: a bucket of gradients; the buffers once more. Collectives: of the mesh none; an all-reduce of all gradients
    over the groups, through host memory, for each batch.
    """

    def __init__(
        self,
        assembled: Assembled,
        persistence: Persistence,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        policy: ReplicaPolicy,
        *,
        address: str,
        setup: str,
    ) -> None:
        self._assembled, self._persistence, self._optimizer = assembled, persistence, optimizer
        self._engine, self._context = assembled.engine, assembled.context
        self.group, self._size = int(os.environ[GROUP]), self._context.layout.num_groups
        self._exchange = Exchange(rank=self._context.rank, timeout_s=policy.late_s)
        self._client = QuorumClient(
            address,
            group=self.group,
            attempt=int(os.environ[ATTEMPT]),
            rank=self._context.rank,
            setup=setup,
            token=os.environ[TOKEN],
            beat_s=policy.silent_s / _BEATS,
            broken=self._exchange.end,
            patience_s=policy.patience_s,
            takeover_s=policy.takeover_s,
        )
        self.is_late = self._client.has_begun  # others train already, and have the state
        self._quorum: Quorum | None = None
        self._is_open = False  # the quorum's step is still to be made
        self._epoch = -1
        self._buffers: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._total = 0.0  # targets of the step's batches so far, of all groups
        self._replays = Replays(policy.replay_every, self._exchange, group=self.group, rank=self._context.rank)
        self.num_repeated = 0

    # ---- who takes part ----------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this group writes what the run writes once: the first one of those that take part."""
        return self._quorum is None or self._quorum.members[0] == self.group

    @property
    def members(self) -> tuple[int, ...]:
        """The groups that take part."""
        return () if self._quorum is None else self._quorum.members

    def begin(self, step: int) -> int:
        """Begin with the others, and return the step that comes next; a loop calls it before its first step.

        A group that comes while others train takes the state of one of these; so does a spare one, once it takes the
        place of one that is lost.

        Args:
            step: With which the run begins: 0, or that of the checkpoint that was loaded.
        """
        if not self.is_late:
            try:
                self.convene(step)
                return step
            except _Spare:
                pass
        quorum = self._convene(NOTHING, stop=False, admits=True)
        while not self._receive(quorum):
            self._vote(ok=False)
            quorum = self._convene(NOTHING, stop=False, admits=True)
        return quorum.step

    def convene(self, step: int, *, stop: bool = False) -> bool:
        """Find out who takes part in a step, and give the state to those who lack it; once a step.

        Args:
            step: The next one.
            stop: Whether this rank was asked to stop.

        Returns:
            Whether some rank was.
        """
        return self._seek(step, stop=stop, admits=True)

    def finish(self, step: int, save: Callable[[], None]) -> None:
        """End the run together: one group saves, and where it is lost meanwhile, another one does.

        Args:
            step: The one after the last.
            save: Called by all ranks of the group that saves.
        """
        while True:
            self.convene(step)
            if self.leads:
                save()
            if self._vote(ok=True):
                return self._client.leave()

    def _seek(self, step: int, *, stop: bool, admits: bool) -> bool:
        """Ask until those who take part have the state; see `convene`.

        Args:
            step: As for `convene`, and so is `stop`.
            admits: Whether groups may come: not between the batches of a step.
        """
        while not (self._is_open and self._quorum is not None and self._quorum.step == step):
            if not self._give(self._convene(step, stop=stop, admits=admits)):
                self._vote(ok=False)
        return self._quorum.stop

    def _convene(self, step: int, *, stop: bool, admits: bool) -> Quorum:
        before, quorum = self.members, self._client.ask(step, stop=stop, admits=admits)
        if quorum is None:
            raise _Spare(
                "this group is spare, and the loop has not called run.replicas.begin(...) before its first step"
            )
        if self.group in quorum.behind and step != NOTHING:
            raise ReplicaError(f"the others began without group {self.group}, and are at step {quorum.step}")
        self._quorum, self._is_open = quorum, True
        if before and before != quorum.members and self._context.rank == 0:
            log.info("step %d: groups %s take part", quorum.step, list(quorum.members))
        return quorum

    def _connect(self, quorum: Quorum) -> None:
        """Connect to the groups of an epoch, if that was not done."""
        if quorum.epoch != self._epoch:
            self._exchange.open(self._client, quorum.epoch, group=self.group, members=quorum.members)
            self._epoch = quorum.epoch

    def _give(self, quorum: Quorum) -> bool:
        """Give this group's state to those who lack it, if it is to; return whether they have it."""
        try:
            self._connect(quorum)
            if quorum.source == self.group:
                for group in quorum.behind:
                    give_state(self._persistence, self._optimizer(), self._exchange, quorum.members.index(group))
        except ExchangeError as error:
            log.debug("step %d: %s", quorum.step, error)
            return False
        return True

    def _receive(self, quorum: Quorum) -> bool:
        try:
            self._connect(quorum)
            take_state(self._persistence, self._optimizer(), self._exchange, quorum.members.index(quorum.source))
        except ExchangeError as error:
            log.debug("step %d: %s", quorum.step, error)
            return False
        self._engine.parameters_loaded()
        return True

    def _vote(self, *, ok: bool) -> bool:
        self._is_open = False
        return self._client.vote(ok=ok)

    # ---- a batch -----------------------------------------------------------------------------------------------------

    def forward_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        """Run one global batch with the other groups; see `Composition.forward_backward`.

        Raises:
            BatchError: It has fewer micro-batches than there are groups.
            StepError: The step was repeated many times, though nobody was lost.
        """
        with self._engine.explaining():
            return self._forward_backward(args, kwargs, target)

    def _forward_backward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Tensor:
        state = self._engine.begun()
        undo = self._mark(state)
        before = self._before(state)
        self._replays.begin()
        for _ in range(_MOST_ATTEMPTS):
            self._seek(state.step, stop=False, admits=not before.gradients)
            self._keep_buffers()
            replayed = None
            if self._replays.is_due(state.step, self.members):
                self._run(args, kwargs, target, ahead=1)
                replayed = digest_of(state.parameters())
                self._forget(state, undo)
            loss = self._run(args, kwargs, target)
            agree = replayed is None or self._replays.agree(state, replayed, members=self.members)
            averaged = self._average(state, loss, before) if agree else None
            if self._vote(ok=averaged is not None) and averaged is not None:
                self._total = averaged.count
                state.metrics |= {"groups": float(len(self.members)), "repeated": float(self.num_repeated)}
                state.metrics |= self._replays.metrics
                return averaged.loss
            self.num_repeated += 1
            self._forget(state, undo)
            self._replays.refuse(state.step)
        raise StepError(f"step {state.step} was tried {_MOST_ATTEMPTS} times, and no exchange between groups succeeded")

    def _forget(self, state: StepState, undo: Callable[[], None]) -> None:
        """Forget the batches since the mark, with their gradients."""
        undo()
        self._restore_buffers()
        for parameter in state.parameters():
            parameter.grad = None

    def _mark(self, state: StepState) -> Callable[[], None]:
        """Return what undoes the batches that follow in the open step, but for their gradients."""
        engine = self._engine
        kept = engine.call, engine.scaling.applied, state.count
        undone = engine.loss_totals.mark(), engine.streams.mark()

        def undo() -> None:
            engine.call, engine.scaling.applied, state.count = kept
            for each in undone:
                each()

        return undo

    def _before(self, state: StepState) -> Before:
        """Set aside what earlier batches of the step have left: gradients of all groups, equal in each of them."""
        is_first = not self._engine.own_steps.num_backwards
        held = [] if is_first else [(each, each.grad) for each in state.parameters() if each.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        return Before(
            gradients=held,
            total=0.0 if is_first else self._total,
            count=0.0 if is_first else self._engine.loss_totals.count,
            announced=state.count,
        )

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, *, ahead: int = 0) -> Tensor:
        """Run this group's piece of a batch, or that of a member so many places ahead."""
        assert self._quorum is not None, "convened"
        engine, members = self._engine, self._quorum.members
        identity, length = engine.identity((args, kwargs, target)), num_samples((args, kwargs, target)) or 0
        size = self._context.manifest.train.microbatch or nominal_size(length, self._size)
        place = (members.index(self.group) + ahead) % len(members)
        first, last = piece_of(length // size, place, len(members))

        def rows(value: Any) -> Any:
            return map_tensors(lambda t: t[first * size : last * size] if t.dim() and len(t) == length else t, value)

        engine.streams.piece = (length, first * size, first)
        try:
            batch = self._assembled.placed(rows(args), rows(kwargs), rows(target))
            return engine.forward_backward(batch, identity=identity, size=size, train=self._assembled.schedule.train)
        finally:
            engine.streams.piece = None

    def _average(self, state: StepState, loss: Tensor, before: Before) -> Averaged | None:
        """Average gradients and the loss over the groups; None where one of them was lost."""
        (axis,) = self._context.layout.names(Role.REPLICA)
        try:
            with self._context.span("all_reduce", group="replicas", axis=axis):
                return average_over_groups(
                    state, loss, before, count=self._engine.loss_totals.count, exchange=self._exchange
                )
        except ExchangeError as error:
            log.debug("step %d: %s", state.step, error)
            return None

    def close(self) -> None:
        """End the connections to the other groups."""
        self._client.close()
        self._exchange.close()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _keep_buffers(self) -> None:
        """Copy buffers that were written since the last copy: a batch that is repeated must not count twice."""
        for part in self._context.parts:
            for buffer in part.module.buffers():
                kept = self._buffers.get(id(buffer))
                if kept is None or kept[0] is not buffer or kept[1] != buffer._version:
                    self._buffers[id(buffer)] = (buffer, buffer._version, local(buffer.detach()).clone())

    def _restore_buffers(self) -> None:
        for buffer, version, value in self._buffers.values():
            if buffer._version != version:
                local(buffer.detach()).copy_(value)


def nominal_size(length: int, num_groups: int) -> int:
    """Return the size of micro-batches of a batch that states none: whole pieces of as many groups as there can be.

    Groups that compute the piece of one that was lost, too, then need no more memory.

    Args:
        length: Samples.
        num_groups: Of the run.
    """
    return max(
        (size for size in range(1, length + 1) if length % size == 0 and length // size >= num_groups), default=1
    )


def piece_of(num_microbatches: int, place: int, num_members: int) -> tuple[int, int]:
    """Return the first micro-batch of a group's piece, and the first one after it.

    Raises:
        BatchError: There are fewer than groups.
    """
    if num_microbatches < num_members:
        raise BatchError(
            f"a batch of {num_microbatches} micro-batches a rank cannot be divided among {num_members} groups; raise "
            "train.global_batch, or lower train.microbatch"
        )
    return place * num_microbatches // num_members, (place + 1) * num_microbatches // num_members


def steps_of_replicas(
    assembled: Assembled,
    persistence: Persistence,
    optimizer: Callable[[], torch.optim.Optimizer | None],
    policy: ReplicaPolicy,
) -> ReplicaSteps:
    """Return the steps with the other groups.

    Raises:
        StepError: Nobody has started this process as one of them.
    """
    address = address_of_quorum()
    if address is None:
        raise StepError(
            f"the manifest has {assembled.context.layout.num_groups} groups of ranks, and this process was started in "
            "none of them; composer3d run starts them, and knows who takes part"
        )
    return ReplicaSteps(assembled, persistence, optimizer, policy, address=address, setup=assembled.setup)
