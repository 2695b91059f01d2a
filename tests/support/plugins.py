"""Plugins that manifests of tests select with `use = "support.plugins:Name"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from composer3d import (
    Metric,
    Phase,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    hookimpl,
    plugin,
)


@plugin(family="sharding", owns=("tp",))
class Lockstep:
    """Own tp without sharding anything: ranks along it compute the same thing."""


@plugin(family="sharding")
class Stale:
    """A layout that is wrong on purpose: gradients of one parameter come out scaled.

    Args:
        factor: Of the gradients.
        fqn: Prefix of the parameters.
    """

    factor: float = 1.001
    fqn: str = "layers.1"

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction:
        return StepAction(name="stale", point=StepPoint.GRADIENTS_REDUCED, run=self._scale)

    def _scale(self, state: StepState) -> None:
        for part in state.parts:
            for fqn, parameter in part.module.named_parameters():
                if fqn.startswith(self.fqn) and parameter.grad is not None:
                    parameter.grad.mul_(self.factor)


@plugin(family="profiling")
class Journal:
    """Write down the points of a step as they come, in `context.state`; veto steps.

    Args:
        veto_rank: The rank that vetoes.
        veto_step: The step that it vetoes.
    """

    veto_rank: int | None = None
    veto_step: int | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        context.state["journal"] = []

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        def action(point: StepPoint) -> StepAction:
            return StepAction(name=f"journal.{point.name}", point=point, run=lambda state: self._note(point, state))

        return [action(point) for point in StepPoint]

    def _note(self, point: StepPoint, state: StepState) -> str | None:
        state.context.state["journal"].append((point.name, state.step, state.index, state.is_last))
        vetoes = (state.context.rank, state.step) == (self.veto_rank, self.veto_step)
        return "the journal is full" if point is StepPoint.DECIDE and vetoes else None

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        return [
            Metric(name=f"rank_{how}", value=float(context.rank + step), reduction=how)
            for how in ("sum", "max", "mean", "rank0")
        ]

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        context.state["metrics"] = (step, dict(metrics))

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        context.state["journal"].append(("CLOSE", type(error).__name__))


@plugin(family="profiling")
class Measuring:
    """Measures what a test says: names and reductions by step and rank; the value is the rank's number plus one."""

    measured: ClassVar[dict[int, Sequence[Sequence[tuple[str, str]]]]] = {}

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        named = self.measured[step][context.rank]
        return [Metric(name=name, value=context.rank + 1.0, reduction=how) for name, how in named]


@plugin(family="profiling")
class Unclosable:
    """Fails when it is closed."""

    @hookimpl
    def composer3d_close(self, context: RunContext) -> None:
        raise OSError("the socket is gone")


class Scaler:
    """Scale by a power of two, so that nothing is rounded; find what is not finite."""

    def __init__(self):
        self.factor, self.log = 4.0, []

    def scale(self, loss):
        return loss * self.factor

    def unscale_(self, optimizer):
        found = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self.factor)
                    found |= not bool(getattr(parameter.grad, "_local_tensor", parameter.grad).isfinite().all())
        return found

    def update(self, skipped):
        self.log.append(skipped)


@plugin(family="precision")
class Scaled:
    """Scale the loss."""

    @hookimpl
    def composer3d_grad_scaler(self, context: RunContext) -> Scaler:
        return context.state.setdefault("scaler", Scaler())


class Tally:
    """State of a plugin: a number and a tensor."""

    def __init__(self, value):
        import torch

        self.steps, self.tensor = 0, torch.full((3,), float(value))

    def state_dict(self):
        return {"steps": self.steps, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.steps, self.tensor = state["steps"], state["tensor"]


@plugin(family="profiling")
class Counting:
    """Keep a state that belongs into checkpoints, and count parameters that became final."""

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        context.state["tally"], context.state["final"] = Tally(1.5), 0

    @hookimpl
    def composer3d_state(self, context: RunContext) -> dict[str, Tally]:
        return {"tally": context.state["tally"]}

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> list[StepAction]:
        return [
            StepAction(name="counting", point=StepPoint.END, run=self._count),
            StepAction(name="counting.final", point=StepPoint.PARAMETERS_FINAL, run=self._final),
        ]

    def _count(self, state: StepState) -> None:
        tally = state.context.state["tally"]
        tally.steps += 1
        tally.tensor += 1

    def _final(self, state: StepState) -> None:
        state.context.state["final"] += 1


@plugin(family="sharding")
class Parallelized:
    """torch's parallelize_module over tp, which unties parameters.

    Args:
        columns: FQNs of linear modules sharded along their outputs, which are all-gathered.
        rows: FQNs of embeddings sharded along their rows.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform:
        return Transform(
            name="parallelized",
            phase=Phase.TENSOR,
            select=lambda model, context: [*self.columns, *self.rows],
            apply=self._apply,
            uses=("tp",),
        )

    def _apply(self, model, fqns, context):
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {fqn: ColwiseParallel(output_layouts=Replicate()) for fqn in self.columns}
        plan |= {fqn: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()) for fqn in self.rows}
        parallelize_module(model, context.mesh["tp"], plan)
        return list(fqns)


class OneByOne:
    """A schedule that, as pipelines do in their first step, calls the loss once more than there are micro-batches."""

    def __init__(self, context, parts, loss_fn):
        self.context, self.module, self.loss_fn, self.knows_shapes = context, parts[0].module, loss_fn, False

    def train(self, microbatches):
        if not self.knows_shapes:
            self.loss_fn(self.module(*microbatches[0].args), microbatches[0].target)
            self.knows_shapes = True
        for index, batch in enumerate(microbatches):
            self.context.microbatches.begin(index, index == len(microbatches) - 1, 0)
            self.loss_fn(self.module(*batch.args), batch.target).backward()
            self.context.microbatches.end()

    def evaluate(self, microbatches):
        for batch in microbatches:
            self.loss_fn(self.module(*batch.args), batch.target)


@plugin(family="scheduling")
class Scheduled:
    """Run the forward itself."""

    @hookimpl
    def composer3d_schedule(self, context, parts, loss_fn) -> OneByOne:
        return OneByOne(context, parts, loss_fn)


@plugin(family="precision")
class Narrowing:
    """Return one parameter as it is loaded in another dtype than it has."""

    @hookimpl
    def composer3d_load_parameter(self, context, fqn, tensor):
        return tensor.bfloat16() if fqn == "norm.weight" else None
