"""An optimizer that steps each parameter inside the backward, as soon as its gradient is final."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import PluginError, StepError
from composer3d.mesh import Role
from composer3d.step import clipping, gradients
from composer3d.transform import StepAction, StepPoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.step.units.unit_record import UnitRecord

__all__ = ["BackwardStepper", "exclusions"]

# Modules of optimizers whose step of a parameter issues no collective; others may set `is_elementwise = True`.
_ELEMENTWISE = {f"torch.optim.{name}" for name in "adadelta adagrad adam adamax adamw asgd nadam radam".split()}
_ELEMENTWISE |= {"torch.optim.rmsprop", "torch.optim.rprop", "torch.optim.sgd"}


def exclusions(context: RunContext, *, has_schedule: bool) -> Iterator[str]:
    """Yield reasons why a composition cannot step in the backward that are known once plugins are configured.

    Args:
        context: Configured.
        has_schedule: Whether a plugin schedules micro-batches.
    """
    if has_schedule:
        yield "a pipeline's micro-batches add to a gradient, and tied weights meet, after the backward of one"
    for name in context.claimants("grad_scaler"):
        yield f"{name} scales the loss, and whether a step is taken is known only when all gradients are there"
    for name in context.claimants("gradients"):
        yield f"{name} needs gradients after the backward, and none is left"
    for name in context.claimants("optimizer", each_alone=True):
        yield f"{name} steps pieces of many parameters, whose transfers hide behind each other"
    for name in context.claimants("stepped_units"):
        yield f"{name} has units stepped one after the other once the backward is over, and none is left to step"


class BackwardStepper:
    """Steps a parameter in the hook that runs when its gradient is accumulated and reduced, and frees the gradient.

    The optimizer receives one parameter at a time, in a copy of its group, so its hyperparameters are those of the step
    and its state is where it always is; for optimizers that update each parameter independently the result is that of
    the ordinary step, bit for bit. A parameter that this rank did not use waits for the end of the backward, which
    knows whether another rank did; without that it is left alone, its decay too. Where stepping a parameter may take
    collectives, which ranks have to issue in one order, they agree on that before each unit is reduced instead.

    Args:
        optimizer: Its parameters are those that are stepped.
        context: With mesh and parts.
        units: Record of the parameters that ranks used.
        actions: Step actions of all plugins, by point.
        has_schedule: Whether a plugin schedules micro-batches.

    Raises:
        PluginError: Something needs the gradients after the backward.

    Memory: the gradients of one unit, which are reduced together, instead of all, and of what this rank did not use.
    Collectives: one all-reduce of one number for the norm; with an optimizer that is not known to step every element by
    itself, as Muon, one all-reduce a unit and axis of one byte a parameter.

    Source: Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, arXiv:2306.09782.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        context: RunContext,
        *,
        units: UnitRecord,
        actions: Mapping[StepPoint, Sequence[StepAction]],
        has_schedule: bool,
    ) -> None:
        self._optimizer, self._context, self._units = optimizer, context, units
        # The bare step: hooks on the optimizer would run once a parameter.
        self._inner = inspect.unwrap(type(optimizer).step)
        self._names = {parameter: fqn for fqn, parameter in context.named_parameters()}
        self._groups = {p: group for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        reasons = [*exclusions(context, has_schedule=has_schedule), *self._needed(actions), *self._foreign()]
        if reasons:
            raise PluginError(f"in_backward cannot be: {reasons[0]}", hint="remove one of the two")
        self._copies, self._apart = context.copies(), gradients.apart(context)
        self._stepped: set[nn.Parameter] = set()
        self._waiting: list[nn.Parameter] = []
        self._squares: list[Tensor] = []
        if not (self._inner.__module__ in _ELEMENTWISE or getattr(optimizer, "is_elementwise", False)):
            units.agree_in_backward()
        self._handles = [parameter.register_post_accumulate_grad_hook(self._step) for parameter in self._groups]

    def close(self) -> None:
        """Remove the hooks from the parameters: the model may outlive this."""
        for handle in self._handles:
            handle.remove()

    def _needed(self, actions: Mapping[StepPoint, Sequence[StepAction]]) -> Iterator[str]:
        between = range(StepPoint.AFTER_BATCH, StepPoint.AFTER_OPTIMIZER)
        for point in (point for point in StepPoint if point in between):
            for action in actions[point]:
                if action.gradients:
                    yield f"{action.name} needs gradients after the backward, and none is left"

    def _foreign(self) -> Iterator[str]:
        from torch.distributed.tensor import DTensor

        layout, owners = self._context.layout, self._context.owners
        averages = layout.degree(Role.BATCH, Role.SEQUENCE) > 1
        plugins = " or ".join(dict.fromkeys(str(owners[axis]) for axis in layout.names(Role.BATCH) if axis in owners))
        for parameter in self._groups:
            if averages and not isinstance(parameter, DTensor):
                yield (
                    f'the gradient of "{self._names[parameter]}" is reduced over ranks after it is accumulated; '
                    f"let the units of {plugins or 'a data-parallel plugin'} reduce it"
                )

    def begin(self, num_backwards: int) -> None:
        """Begin a step's backward.

        Raises:
            StepError: The step has more than one: the first would step with a part of the gradient.
        """
        if num_backwards > 1:
            raise StepError(
                "the optimizer steps in the backward, when a gradient is complete after one micro-batch, and this step "
                "has more; give a step one micro-batch a rank, or leave in_backward out"
            )
        self._stepped.clear()
        self._waiting.clear()
        self._squares.clear()

    def _step(self, parameter: nn.Parameter) -> None:
        if parameter in self._stepped:
            raise StepError(f'"{self._names[parameter]}" got its gradient in parts; leave in_backward out')
        self._stepped.add(parameter)
        if self._units.is_unused(parameter):
            parameter.grad = None
        elif self._units.is_idle(parameter):
            self._waiting.append(parameter)
        else:
            self._step_alone(parameter)

    def step_waiting(self) -> None:
        """Step parameters that this rank did not use and another one did: they still have a gradient."""
        for parameter in self._waiting:
            if parameter.grad is not None:
                self._step_alone(parameter)
        self._waiting.clear()

    def _step_alone(self, parameter: nn.Parameter) -> None:
        import torch

        gradients.settle_partial([parameter])
        assert parameter.grad is not None, "the hook runs where there is one"
        self._measure(parameter, parameter.grad)
        group = self._groups[parameter]
        alone = {**group, "params": [parameter]}
        groups, self._optimizer.param_groups = self._optimizer.param_groups, [alone]
        try:
            with torch.no_grad():
                self._inner(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
        changed = [key for key in group if key != "params" and alone[key] is not group[key]]
        if changed:
            raise StepError(
                f'{type(self._optimizer).__name__} counts in "{changed[0]}" of a group, once for each parameter that '
                "is stepped by itself; leave in_backward out"
            )
        parameter.grad = None

    def _measure(self, parameter: nn.Parameter, grad: Tensor) -> None:
        import torch

        values = gradients.local(grad)
        if values.numel() and id(parameter) not in self._copies:
            share = clipping.weight(grad, self._context.layout, apart=self._apart.get(id(parameter), ()))
            self._squares.append(torch.linalg.vector_norm(values).double().square() * share)

    def finish(self, correction: float) -> None:
        """End a step's backward.

        Args:
            correction: Factor by which all gradients would have to be multiplied; 1 if none.

        Raises:
            StepError: It is not 1, or no hook saw a gradient.
        """
        if correction != 1.0:
            raise StepError(
                "the loss counted other tokens than its targets have, and the optimizer has stepped with their number; "
                "let count_fn count what the loss counts, or leave in_backward out"
            )
        missed = [name for parameter, name in self._names.items() if parameter.grad is not None]
        if missed:
            raise StepError(f'the gradient of "{missed[0]}" came where no hook saw it; leave in_backward out')
        if self._groups and not self._stepped:
            raise StepError(
                "no parameter got a gradient; return the model's output as a tensor, or in a known container"
            )

    def norm(self, max_norm: float, norm_type: float, *, group: Any, device: torch.device) -> Tensor:
        """Return the norm of the full model's gradient, measured before gradients were freed.

        Args:
            max_norm: Infinity; anything else would clip.
            norm_type: 2; no other is measured.
            group: Process group of the ranks of one global batch.
            device: Of the reduced number.

        Raises:
            StepError: Gradients were to be clipped, or another norm is requested.
        """
        import torch
        import torch.distributed as dist

        if not math.isinf(max_norm) or norm_type != 2:
            raise StepError(
                "gradients are gone after the backward, in which the optimizer stepped: only their 2-norm is known; "
                "write max_norm = infinity, or leave in_backward out"
            )
        total = torch.zeros((), dtype=torch.float64, device=device)
        for square in self._squares:
            total += square.to(device)
        dist.all_reduce(total, group=group)
        return total.sqrt()
