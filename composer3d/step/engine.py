"""Step engine: micro-batches, loss normalisation, the guard, and the points at which plugins act."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError
from composer3d.hooks.blame import in_turn
from composer3d.interfaces import Batch, Loss
from composer3d.step import gradients
from composer3d.step.activation_gradients import ActivationGradients
from composer3d.step.evaluation import reshard_units
from composer3d.step.guard import Guard
from composer3d.step.loops.accumulated_steps import AccumulatedSteps
from composer3d.step.loops.dropped_gradients import DroppedGradients
from composer3d.step.loops.loop_state import LoopState
from composer3d.step.loops.outside_parameters import OutsideParameters
from composer3d.step.loops.own_forward import OwnForward
from composer3d.step.loops.own_steps import OwnSteps, refuse_incomplete
from composer3d.step.loops.parameter_hooks import ParameterHooks
from composer3d.step.losses.criterion import Criterion
from composer3d.step.losses.loss_graph import penalised_parameters
from composer3d.step.losses.loss_totals import LossTotals
from composer3d.step.microbatches import Splitter
from composer3d.step.optimizers.optimizer_in_backward import BackwardStepper
from composer3d.step.scaling import Scaling
from composer3d.step.step_state import StepState
from composer3d.step.units.unit_record import UnitRecord
from composer3d.step.votes import Votes
from composer3d.transform import StepAction, StepPoint, by_point

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.observation.flight_recorder import Flight
    from composer3d.step.losses.loss_graph import Reduction
    from composer3d.step.random_numbers.random_streams import Streams

__all__ = ["StepEngine"]


class StepEngine:
    """Runs steps; everything it calls was frozen when the run was composed."""

    def __init__(
        self,
        *,
        context: RunContext,
        actions: Sequence[StepAction],
        guard: Guard,
        flight: Flight | None,
        loss_totals: LossTotals,
        streams: Streams,
        criterion: Criterion,
    ) -> None:
        self._context, self.guard, self.loss_totals, self.streams = context, guard, loss_totals, streams
        plain: Any = contextlib.nullcontext()  # may be entered any number of times at once
        self.explaining = flight.explaining if flight is not None else lambda activity="": plain
        self.actions = by_point(actions)
        self._in_turn = {at: in_turn([a.run for a in found], is_heard=False) for at, found in self.actions.items()}
        self.loop, self.criterion, self._dropped = LoopState(context), criterion, DroppedGradients()
        self.accumulated, self.outside, self.scaling = AccumulatedSteps(), OutsideParameters(context), Scaling()
        self.parameter_hooks = self.loop.hooks = hooks = ParameterHooks(context, self.scaling, self.actions)
        self.activations = ActivationGradients(context, loss_totals.averages, self.outside.parameters, hooks=hooks)
        self.scaling.inputs, self._moves_gradients = self.activations.inputs, bool(context.claimants("moved_gradients"))
        self._votes = Votes(self.actions[StepPoint.DECIDE], self.scaling, guard)
        self.units = UnitRecord(context, guard, flight, left=self.leave_own_forward)
        self.own_steps, self._split = OwnSteps(lambda number: self.step(number, None)), Splitter()
        self.is_plain = self.is_stepping = False  # plain: the loop knows that its backwards are not this composition's
        self.stepper: BackwardStepper | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.settle: Callable[[], None] = lambda: None  # returns when parameters and optimizer state may be written to
        self.state: StepState | None = None
        self._own: OwnForward | None = None
        self._final: list[nn.Parameter] = []  # whose gradients are used in this step
        self._scheduled = self._evaluating = self._bypassed = self._equal = self._gathered = False

    @contextlib.contextmanager
    def step(self, number: int, target: Any) -> Iterator[StepState]:
        """Open step `number`; see `Composition.step`."""
        if self.own_steps.is_open and not self.own_steps.num_backwards:
            self.own_steps.abandon()  # a forward before the loop's first step opened one
        if self.state is not None:
            raise StepError(f"step {number} begins inside step {self.state.step}; steps do not nest")
        self.state = StepState(step=number, context=self._context, parts=self._context.parts, optimizer=self.optimizer)
        self.own_steps.next = number + 1
        self.call, self._num_forwards, self._seen, self.is_stepping = 0, 0, 0, False
        self._begin_anew()
        self.streams.begin(number)
        try:
            with self.explaining(), self._context.span("step", step=number), self.units.over("step", number):
                self._at(StepPoint.BEGIN)
                if target is not None:
                    self._announce_own(target, self.identity(target))
                yield self.state
                self._at(StepPoint.END)
        finally:
            self.settle()
            self.streams.leave()
            self.state = None

    def current(self, call: str) -> StepState:
        """Return the open step, or raise an error that `call` needs one."""
        if self.state is None:
            raise self.own_steps.outside(call)
        return self.state

    def begun(self) -> StepState:
        """Return the open step, or open the next one: it ends with the optimizer's step."""
        return self.own_steps.open() if self.state is None else self.state

    def _at(self, point: StepPoint) -> None:
        self._in_turn[point](self.state)

    def begin_microbatch(self, index: int, is_last: bool, stage: int = 0) -> None:
        """Start a micro-batch: its random stream, then the actions."""
        if self._evaluating:
            return self.streams.evaluate(index, stage)
        state = self.current("begin_microbatch")
        state.index, state.is_last = index, is_last
        if not state.forward_done:
            self.streams.enter(state.step, (self.call << 16) + index, stage, index=index)
        self._at(StepPoint.BEFORE_MICROBATCH)

    def resume_microbatch(self, index: int, stage: int) -> None:
        """Return to a micro-batch's random stream, for a backward that does not follow its forward at once."""
        state = self.current("resume_microbatch")
        state.index = index
        self.streams.enter(state.step, (self.call << 16) + index, stage, index=index)

    def end_microbatch(self) -> None:
        """Run what follows a micro-batch."""
        if not self._evaluating:
            self.activations.end_microbatch()
            self._at(StepPoint.AFTER_MICROBATCH)

    def identity(self, value: Any) -> int:
        """Return the digest that ranks of one batch compare; before plugins shard it and it moves to a device."""
        return self.guard.digest(value)

    def forward_backward(
        self, batch: Batch, *, identity: int, size: int | None, train: Callable[[Sequence[Batch]], None]
    ) -> Tensor:
        """Run one batch of an open step; see `Composition.forward_backward`."""
        state = self.begun()
        self._refuse_used("forward_backward")
        microbatches = self._split(batch, size)
        if self.stepper is not None:
            self.stepper.begin(self.call + len(microbatches))
        self._agree(self.criterion.count_all(microbatches), identity, batch.copy)
        self.own_steps.num_backwards += 1
        self._scheduled = True
        try:
            span = self._context.span("forward_backward", microbatches=len(microbatches))
            self.streams.announce(microbatches)
            with span, self.units.trained(), self.activations, self._held(is_last=True):
                train(microbatches)
        finally:
            self.streams.leave()
            self._scheduled = False
        return self._settle(state, len(microbatches))

    def evaluate(
        self, batch: Batch, *, identity: int, size: int | None, number: int, evaluate: Callable[[Sequence[Batch]], None]
    ) -> tuple[Tensor, float]:
        """Run one batch without gradients; see `Composition.evaluate`."""
        if self.loss_totals.pending:
            raise StepError("evaluate was called between a backward and its last one; finish the batch first")
        microbatches = self._split(batch, size)
        counts = self.criterion.count_all(microbatches)
        with self.explaining("evaluate"):
            totals = self.guard.agree(step=number, call=None, counts=counts, digest=identity, copy=batch.copy[0])
        self.loss_totals.copy, outer, self._equal, self._evaluating = batch.copy, self._equal, totals.equal, True
        try:
            streams, units = self.streams.over(microbatches, evaluates=True), self.units.over("evaluation", number)
            with streams, self.explaining(), self._context.span("evaluate"), units:
                evaluate(microbatches)
            return self.loss_totals.settle(len(microbatches), has_gradient=False)
        finally:
            self._equal, self._evaluating = outer, False

    def loss(self, output: Any, target: Any) -> Tensor:
        """Compute the loss of one micro-batch, record it, and return what its backward starts from."""
        if self._evaluating:
            return self.loss_totals.record(self.criterion.loss_of_evaluation(output, target, equal=self._equal))
        with self.activations.over_loss(output):
            return self._started(self.criterion.loss(output, target, equal=self._equal))

    def _started(self, loss: Loss) -> Tensor:
        return self.activations.look(self.scaling.scale(self.loss_totals.scaled(loss)))

    def _settle(self, state: StepState, num_microbatches: int) -> Tensor:
        with self._context.span("all_reduce", group="loss", axis="world"):
            loss, _ = self.loss_totals.settle(num_microbatches, also=self.units.numbers(), own=self._own is not None)
        self.units.settle(self.loss_totals.added)
        if self.loss_totals.auxiliary:
            state.metrics["auxiliary_loss"] = self.loss_totals.auxiliary
        if not self._moves_gradients:
            self.units.drop_unused()
        self._at(StepPoint.AFTER_BATCH)
        if self.stepper is not None and not self._moves_gradients:
            self.stepper.step_waiting()
        if self._moves_gradients or self.stepper is not None:
            return loss
        parameters = list(state.parameters())
        if not self.actions[StepPoint.GRADIENTS_LOCAL]:
            gradients.settle_partial(parameters)
        self._correct(parameters)
        self.parameter_hooks.settle()
        self.loop.gradients.begin(parameters)
        return loss

    def _held(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        number = self.own_steps.num_backwards
        return self.parameter_hooks.held(number, is_last=is_last, is_stepped=self.stepper is not None)

    def _correct(self, parameters: Sequence[nn.Parameter]) -> None:
        self.scaling.correct(parameters, 1.0 if self._own and self._own.is_summed else self.loss_totals.correction)

    @property
    def is_running(self) -> bool:
        """Whether a forward that begins now is the engine's, of a batch that plugins have placed."""
        return self._scheduled or self._evaluating

    def enter_own_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool) -> None:
        """Start the random stream of a forward that the loop runs itself inside a step; open one to train in."""
        if self.is_running:
            return
        if self.own_steps.is_open and self._dropped.are_gone(self._own, self.state):
            self.own_steps.close()
        if self.state is None and trains and self.optimizer is not None and not self.is_plain:
            self.own_steps.open()
        self.own_steps.count_forward((args, kwargs))
        if self.state is not None:
            if self._own is None:  # else the step was announced with its target, or by its first backward
                self._seen += self.identity((args, kwargs))
            self.streams.announce([Batch(args=args, kwargs=kwargs)])
            self.streams.enter(self.state.step, self._num_forwards, index=0)
            self._num_forwards += 1

    def leave_own_forward(self) -> None:
        """End a forward that the loop runs itself: the next draws are its own, and without gradients units reshard."""
        import torch

        if self.is_running:
            return
        self.streams.leave()
        if torch.is_grad_enabled():
            self._gathered = True
        else:
            reshard_units(self._context.parts, held=False)

    def backward(
        self, value: Any, *, last: bool, reduction: Reduction | None = None, retain_graph: bool = False
    ) -> Tensor | None:
        """Run the backward of a loss that the loop computed; see `Composition.backward`."""
        self.criterion.end_following()
        state = self.begun()
        if self._dropped.are_gone(self._own, self.state):
            self._begin_anew()
        self._refuse_used("backward")
        own = self._own or self._announce_own(None, self._seen % (1 << 62))
        self.loss_totals.copy = 0, 1
        number, reduction = self.own_steps.count_backward(), reduction or self.criterion.told
        loss = own.loss(value, last=last, equal=self._equal, reduction=reduction, num_samples=number)
        self.criterion.mixed.look(value, number, reduction=reduction, parts=self.own_steps.parts, ranks=own.ranks)
        self.units.use(penalised_parameters(value))
        if self.stepper is not None:
            self.stepper.begin(own.calls + (not last))
        state.forward_done, state.loss = True, self._started(loss)
        self.begin_microbatch(own.calls - 1, last)
        span, held = self._context.span("backward"), self._held(is_last=last)
        with span, self.streams.kept(), self.units.trained(), self.activations, held:
            state.loss.backward(retain_graph=retain_graph)
        self.end_microbatch()
        self._gathered, state.forward_done, state.loss = False, False, None
        if not last:
            return None
        mean = self._settle(state, self.loss_totals.pending) * own.handed()
        state.divided = own.divided(self.loss_totals.count)
        if self.stepper is None and not self._moves_gradients:
            self._dropped.complete(state)
        return mean

    def _begin_anew(self) -> None:
        """Drop the counts of this step's backwards, whose gradients were dropped."""
        self.loss_totals.clear()
        self._dropped.forget()
        self.scaling.begin()
        self._own, self._used = None, False
        self.own_steps.forget()

    def _announce_own(self, target: Any, identity: int) -> OwnForward:
        self._own = own = OwnForward.announced(target, criterion=self.criterion, context=self._context)
        self._agree([own.count], identity)
        own.total = self.loss_totals.divisor or 1
        return own

    def _agree(self, counts: Sequence[int], identity: int, copy: tuple[int, int] = (0, 1)) -> None:
        assert self.state is not None, "inside a step"
        step, call, self.loss_totals.copy = self.state.step, self.call, copy
        with self._context.span("all_reduce", group="counts", axis="world"):
            # `verify` lets a fault run on, and reports its effects.
            compares = self.guard.compares and not call and self._context.purpose == "run"
            given = {"decided": self.loop.decided(step, self.optimizer)} if compares else {}
            totals = self.guard.agree(step=step, call=call, counts=counts, digest=identity, copy=copy[0], **given)
        self.call, self._equal = self.call + 1, totals.equal
        self.state.count += totals.count
        self.loss_totals.announce(totals.count)

    def gradients_ready(self, call: str) -> list[nn.Parameter]:
        """Reduce and scale the open step's gradients, once, and return this rank's parameters."""
        state = self.current(call)
        if self._gathered:  # units, by a forward without a backward
            self._gathered = False
            reshard_units(state.parts)
        if not self._used:
            self._finish_gradients(state, call)
        return self._final

    def _finish_gradients(self, state: StepState, call: str) -> None:
        is_foreign = bool(self._num_forwards and not self.own_steps.num_backwards and not self.is_plain)
        refuse_incomplete(call, step=state.step, is_pending=bool(self.loss_totals.pending), is_foreign=is_foreign)
        self._used, self._final = True, (parameters := list(state.parameters()))
        self.loop.gradients.end()
        if self.stepper is not None:
            return self.stepper.finish(self.loss_totals.correction)  # no gradients are left
        self._at(StepPoint.GRADIENTS_LOCAL)  # restores offloaded state
        if self._moves_gradients:
            self.units.drop_unused()
        gradients.refuse_none(parameters, step=state.step)
        gradients.settle_partial(parameters)
        self.outside.average()
        self._correct(parameters)
        self._at(StepPoint.GRADIENTS_REDUCED)
        self.scaling.unscale(self.optimizer)
        self._at(StepPoint.UNSCALED)
        self.parameter_hooks.settle(is_used=True)

    def clipped(self, max_norm: float) -> list[nn.Parameter]:
        """Return parameters with their final gradients, and record `max_norm`, which the next step compares."""
        self.loop.clip_norm = float(max_norm)
        return self.gradients_ready("clip_grad_norm_")

    def optimizer_step(self, inner: Callable[[], Any]) -> Any:
        """Run an optimizer step, unless some rank vetoes it."""
        if self._bypassed or not self.accumulated.is_last:
            return inner() if self._bypassed else None
        self.gradients_ready("optimizer.step")
        self.settle()
        state = self.current("optimizer.step")
        state.vetoes = self._votes.vetoes(state)
        self.is_stepping = True
        if not state.vetoes:
            self._at(StepPoint.BEFORE_OPTIMIZER)
            with self._context.span("optimizer"):
                result = inner() if self.stepper is None else None
            for point in (StepPoint.AFTER_OPTIMIZER, StepPoint.PARAMETERS_SYNCHRONISED, StepPoint.PARAMETERS_FINAL):
                self._at(point)
        self.is_stepping = False
        self.loop.stepped(self.optimizer, following=self.own_steps.next)
        self.scaling.update(state.vetoes)
        self.own_steps.close()
        return None if state.vetoes else result

    def parameters_loaded(self) -> None:
        """Run the actions that depend on final parameters, after a load or another change between steps."""
        self._between("parameters_changed")
        self.loop.forget_writes()
        self.state = StepState(step=-1, context=self._context, parts=self._context.parts, optimizer=self.optimizer)
        try:
            self._at(StepPoint.PARAMETERS_FINAL)
        finally:
            self.state = None

    @contextlib.contextmanager
    def bypassed(self) -> Iterator[None]:
        """Let the optimizer step outside steps, for checkpoints that need its state to exist."""
        self._between("load")
        self._bypassed = True
        try:
            yield
        finally:
            self._bypassed = False

    def _between(self, call: str) -> None:
        self.own_steps.abandon()
        if self.state is not None:
            raise StepError(f"{call} was called inside step {self.state.step}; call it between steps")

    def _refuse_used(self, call: str) -> None:
        if self._used:
            raise StepError(
                f"{call} was called after the gradients of this step had been clipped or used; "
                "run all batches of a step first, and open a new step for the next optimizer step"
            )
