"""The composition, through which a training loop works."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.composition.assembling import Assembled
from composer3d.composition.closing import close_all
from composer3d.composition.composed_model import span_hooks
from composer3d.composition.composed_model.changed_models import composed_modules
from composer3d.composition.composed_model.model_hooks import watch_model
from composer3d.composition.composed_model.unsaved_shards import refuse_saving
from composer3d.composition.loop.own_loop import OwnLoop, refused_after_close
from composer3d.composition.loop.own_optimizer import refuse_other_optimizers
from composer3d.composition.loop.stage_parameters import refuse_norms_of_stages
from composer3d.composition.preparing import PlanRow
from composer3d.composition.run_state.persistence import Persistence
from composer3d.composition.run_state.saved_run import SavedRun
from composer3d.errors import StepError
from composer3d.step import clipping, gradients
from composer3d.step.evaluation import EvaluatedWeights, Evaluation, evaluating, reshard_units
from composer3d.step.optimizers.optimizer import compose_step, make_optimizer
from composer3d.step.optimizers.optimizer_in_backward import BackwardStepper
from composer3d.step.optimizers.unit_steps import SteppedUnit, SteppedUnits, unit_by_unit
from composer3d.step.sharded_tensors.full_tensors import full
from composer3d.step.step_state import StepState

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.composition.replica_groups.replica_steps import ReplicaSteps

__all__ = ["Composition"]


class Composition(SavedRun, OwnLoop):
    """A composed model. Everything here is collective: all ranks call the same methods in the same order.

    Attributes:
        averages_buffers: Whether `save`, `evaluate` and `full_state_dict` average buffers first, as `sync_buffers`.
        replicas: The other groups of ranks that train this model, and come and go; None without any.
    """

    def __init__(self, assembled: Assembled) -> None:
        self._assembled, self._engine = assembled, assembled.engine
        self._closed, self._evaluations, self._compared = False, 0, 0
        # What a forward changes is another one on every data-parallel rank, and one of them is read or saved.
        self.averages_buffers = True
        self._persistence = Persistence(assembled)
        self._optimizer: torch.optim.Optimizer | None = None
        self.replicas = self._steps_of_replicas()
        self._composed = composed_modules(self.parts)
        self._unwatch = refuse_other_optimizers(self._engine, self.context, self._composed)
        if assembled.has_schedule:
            refuse_norms_of_stages(self.context)
        else:
            watch_model(self.parts[0].module, self._engine, self.context, assembled.placed_call)

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> tuple[PlanRow, ...]:
        """The transforms applied to the model, in order."""
        return self._assembled.plan

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all axes."""
        return self.context.mesh

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's index along every axis."""
        return self.context.coordinates

    def full_tensor(self, fqn: str, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter, of its gradient, or of another tensor sharded like it, as the model has it.

        DTensor's own `full_tensor()` gathers shards as they are kept: rows of a fused projection, of query, key and
        value for example, which tensor parallelism shards per part, are then in another order than the model's.
        Collectives: those of `DTensor.full_tensor`, so every rank that holds a shard calls this.

        Args:
            fqn: Of the parameter.
            tensor: Sharded as it; a plain tensor is returned as it is.

        Raises:
            StepError: The model has nothing of this name.
        """
        self._refuse_unknown(fqn)
        return self.context.in_model_order(fqn, full(tensor))

    def describe(self) -> str:
        """Return the layout and the ordered plan as text; the same for any order of the manifest's tables."""
        rows = [f"{self.context.layout} on {self.context.device.type}", *map(str, self.plan)]
        return "\n".join(row.rstrip() for row in rows)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, number: int, *, target: Any = None) -> contextlib.AbstractContextManager[StepState]:
        """Open an optimizer step. A loop that opens none has one from its first forward to the optimizer's `step`.

        Args:
            number: Seeds the random streams, so it must be the same on all ranks and continue after a resume.
            target: For a loop that runs its own forward: this rank's targets of the whole step, whose valid tokens
                normalise the loss. Without it every `backward` weighs the same, and in one of them each rank by the
                targets that its mean was divided by.

        Raises:
            StepError: Steps nest, or ranks do not run the same step.
        """
        return self._engine.step(number, target)

    def steps(self, loader: Iterable[Any], *, start: int = 0) -> Iterator[Any]:
        """Yield the loader's batches, each in a step of its own, numbered from `start`."""
        for number, batch in enumerate(span_hooks.waits(loader, self.context), start):
            with self.step(number):
                yield batch

    def forward_backward(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of one batch: micro-batches, pipeline, scaling.

        The gradient, in any layout, is that of the loss summed over all valid tokens of the global batch, divided by
        their number. Several calls in one step make one global batch. A loss that relates the samples of a batch
        (contrastive, a mean over pairs) relates those of each micro-batch alone; its first call logs a warning of
        that with data-parallel ranks, unless `compose(loss_reduction=...)` states the reduction.
        Collectives: one all-reduce before (counts and the guard), one after (the loss), and those of the plugins.

        Args:
            args: The model's, x_B... of this data-parallel rank; ranks that differ only in tp or pp pass the same. Of
                `kwargs` too tensors with as many rows as there are samples are divided among micro-batches, and others
                passed whole to each: what holds no row a sample, and might have as many, takes a leading dim of 1.
            target: Passed to the loss, such as targets_BS.

        Returns:
            The mean loss of the global batch, the same on every rank.

        Raises:
            StepError: Outside a step, or ranks differ.
            BatchError: The batch does not divide into micro-batches.
            LossError: The normalisation of the loss is unknown.
        """
        self._refuse_without_gradients("forward_backward")
        if self.replicas is not None:
            return self.replicas.forward_backward(args, kwargs, target)
        identity = self._engine.identity((args, kwargs, target))
        with self._engine.explaining(), self._engine.criterion.inside.apart():
            return self._engine.forward_backward(
                self._assembled.placed(args, kwargs, target),
                identity=identity,
                size=self.context.manifest.train.microbatch,
                train=self._assembled.schedule.train,
            )

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Evaluation:
        """Run the forward of one batch without gradients, in evaluation mode; inside or outside a step.

        Args:
            args: The model's.
            target: Passed to the loss, such as targets_BS.
        """
        identity, batch = self._engine.identity((args, kwargs, target)), self._assembled.placed(args, kwargs, target)
        self._evaluations += 1
        self._persistence.copies.settle()
        self._average_buffers()
        weights, apart = self.context.stash(EvaluatedWeights).applied(), self._engine.criterion.inside.apart()
        with weights, evaluating(self.parts), apart:
            loss, count = self._engine.evaluate(
                batch,
                identity=identity,
                size=self.context.manifest.train.microbatch,
                number=self._evaluations,
                evaluate=self._assembled.schedule.evaluate,
            )
        return Evaluation(loss=loss, count=count)

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down so that the norm of the full model's gradient is at most `max_norm`.

        Collectives: one all-reduce of one number, whatever the meshes.

        Args:
            max_norm: Infinity only measures.
            norm_type: 2, or infinity.

        Returns:
            The norm before, the same on every rank.
        """
        import torch

        if not self.sync_gradients:
            return torch.tensor(math.nan)
        where: Any = {"group": self._assembled.group, "device": self._assembled.control_device}
        with self._engine.explaining():
            parameters, stepper = self._engine.clipped(max_norm), self._engine.stepper
            with self.context.span("all_reduce", group="norm", axis="world"):
                if stepper is not None:
                    return stepper.norm(max_norm, norm_type, **where)
                where |= {"layout": self.context.layout, "copies": self.context.copies(), "apart": self._apart}
                norm = clipping.clip_norm_(parameters, max_norm, norm_type=norm_type, **where)
            self._engine.loop.gradients.begin(parameters)
            return norm

    @functools.cached_property
    def _apart(self) -> gradients.Apart:
        return gradients.apart(self.context)

    # ---- around steps ------------------------------------------------------------------------------------------------

    def explaining(self, activity: str = "") -> contextlib.AbstractContextManager[None]:
        """Explain collectives of the loop's own that fail inside, as those in steps are explained.

        Steps, evaluations, `save`, `load` and `report` do so by themselves.

        Args:
            activity: What the loop does, for the text.

        Raises:
            StepError: A rank is gone or late; names it, the axis, and what every rank did last.
        """
        return self._engine.explaining(activity)

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_backward: bool = False,
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """Make the optimizer over all parts.

        Args:
            cls: Any torch optimizer class.
            groups: Each with `match`, a regular expression searched in FQNs, and the hyperparameters of what matches;
                the first match wins, and what matches none takes the defaults.
            in_backward: Step each parameter as soon as its gradient is final, in the backward, and free the gradient;
                `step` then only ends the step. For steps of one micro-batch, without clipping.
            defaults: Hyperparameters.

        Returns:
            An instance of a subclass of `cls`: learning-rate schedulers accept it. Its `step` runs the step's actions
            and leaves the weights alone where a rank vetoed.

        Raises:
            StepError: There is one already, or a group has no regular expression `match`.
            PluginError: `in_backward`, and something needs gradients after the backward; or a plugin has units that are
                stepped by themselves, and nothing says that this class can.
            PatternError: A group matches nothing in the whole model.
        """
        if self._optimizer is not None:
            name = type(self._optimizer).__name__
            raise StepError(
                f"this composition has its optimizer already, {name}: run.optimizer(...), and run.prepare(...) of an "
                "optimizer, are for the first and only one; give it groups, change these, add some by "
                "optimizer.add_param_group, or close this run, and compose anew for another optimizer"
            )
        reshard_units(self.parts)
        hooks = self._assembled.hooks
        plugin, optimizer = make_optimizer(cls, groups or (), defaults, context=self.context, hooks=hooks)
        acts: Any = functools.partial(self._assembled.acting.named, plugin) if plugin else lambda inner: inner
        self._optimizer = self._engine.optimizer = compose_step(
            optimizer,
            lambda inner: self._optimizer_step(acts(inner)),
            clear=self._clear_gradients,
            added=self._added,
            in_units=functools.partial(unit_by_unit, asked=self._stepped_units, span=self.context.span),
        )
        refuse_saving(optimizer, of_stage=self._assembled.has_schedule)
        if in_backward:
            self._engine.stepper = BackwardStepper(
                optimizer,
                self.context,
                units=self._engine.units,
                actions=self._engine.actions,
                has_schedule=self._assembled.has_schedule,
            )
        return self._optimizer

    def _steps_of_replicas(self) -> ReplicaSteps | None:
        """Return the steps with other groups of ranks; None where there are none, or nobody runs."""
        policy = self._assembled.hooks.replicas(self.context)
        if policy is None or self.context.purpose != "run" or self.context.layout.num_groups == 1:
            return None
        # Sockets and servers, of which a plan needs nothing.
        from composer3d.composition.replica_groups.replica_steps import steps_of_replicas

        return steps_of_replicas(self._assembled, self._persistence, lambda: self._optimizer, policy)

    def _stepped_units(self) -> Sequence[SteppedUnit]:
        """Return the units that are stepped by themselves: none where a checkpoint has the optimizer's state made."""
        return self.context.stash(SteppedUnits).units if self._engine.is_stepping else ()

    def _optimizer_step(self, inner: Callable[[], Any]) -> Any:
        with self._engine.explaining():
            return self._engine.optimizer_step(inner)

    def report(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the metrics that plugins measure to a step's, and pass all to every plugin that takes metrics.

        Collectives: one all-gather, if a plugin measures.

        Args:
            metrics: Equal on all ranks.

        Returns:
            All metrics, reduced.
        """
        with self.explaining("report"):
            measured = self._assembled.measurement(step, taken=metrics)
        told = {**metrics, **measured}
        return told if self.replicas is not None and not self.replicas.leads else self._assembled.reported(step, told)

    def close(self, error: BaseException | None = None) -> None:
        """Wait for checkpoints, close the plugins, and destroy the process group if `compose` made it; the last call.

        Args:
            error: Error that ended the run, for the plugins.

        Raises:
            StepError: Replicas hold other values after the last step; the run is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        # A rank that was refused has caught the error by now, if its loop goes on.
        failed = error is not None or sys.exc_info()[1] is not None or self._engine.guard.has_refused
        self._engine.own_steps.abandon()
        self._engine.accumulated.close()
        stepper = self._engine.stepper
        hooks = self._assembled.hooks
        recording = hooks.implementing("composer3d_recorder")  # last: they record what the others do
        plugins = sorted(hooks.close(), key=lambda bound: bound[0] in recording)
        arguments: Any = {"context": self.context, "error": error}
        close_all(
            (
                *(() if failed else (self._compare_at_the_end,)),
                self._unwatch,
                self._engine.activations.leave_loop,
                self._engine.criterion.inside.close,
                *(() if stepper is None else (stepper.close,)),
                functools.partial(self._persistence.close, error),
                *(() if self.replicas is None else (self.replicas.close,)),
                *(
                    functools.partial(self._assembled.acting.named(owner.name, function), **arguments)
                    for owner, function in plugins
                ),
                self._assembled.release,
            ),
            error=error,
        )
        self._engine.explaining, self._engine.optimizer = refused_after_close, None  # a forward opens no step

    def __enter__(self) -> Composition:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)
