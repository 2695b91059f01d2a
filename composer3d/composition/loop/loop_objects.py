"""Optimizers, schedulers and dicts that a loop has made for one device, adopted by a composition.

They are changed in place, so that whatever holds them, a scheduler or a callback, goes on with the same objects.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext

__all__ = ["DictState", "GivenParameters", "adopt_optimizer", "adopt_scheduler"]

_KEPT = ("params", "match")


class DictState:
    """State of a loop's own dict, which a load fills in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """Return the dict's values."""
        return dict(self._values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put these values in the place of the dict's."""
        self._values.clear()
        self._values.update(state_dict)


class GivenParameters:
    """Names of the parameters that a model had before it was composed, for optimizers that were made then."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}

    def record(self, model: nn.Module) -> None:
        """Record the names of a model that exists; the parameters are not kept alive."""
        self._names = {id(p): (weakref.ref(p), name) for name, p in model.named_parameters()}

    def name(self, parameter: Any) -> str | None:
        """Return the FQN of a parameter of that model, None of another one."""
        reference, name = self._names.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, make: Callable[..., torch.optim.Optimizer], context: RunContext
) -> None:
    """Give an optimizer of one device the composition's parameters and step, in place.

    Args:
        optimizer: Not yet stepped, over all trainable parameters of the model as it was before `compose`, or as it is,
            and any frozen ones.
        make: Makes the composition's optimizer, given the class, groups that name FQNs, and the class's arguments.
        context: Of the run.

    Raises:
        StepError: It has state, leaves parameters out, has others than the model's, or cannot be made again.
    """
    name = type(optimizer).__name__
    if optimizer.state:
        raise StepError(
            f"the {name} has stepped, and its state is of one device's tensors; compose before the first step, and "
            'write run.load("checkpoints/100") for the state of a run'
        )
    cls = type(optimizer)
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise StepError(
            f"the {name} calls a closure again, and a composed step runs once; use an optimizer that does not"
        )
    names = _names_of_groups(optimizer, context)
    arguments = {key: value for key, value in optimizer.defaults.items() if key in _parameters_of(cls)}
    groups = [
        {"match": _exactly(fqns), **{key: value for key, value in group.items() if key not in _KEPT}}
        for fqns, group in zip(names, optimizer.param_groups, strict=True)
        if fqns
    ]
    try:
        made = make(cls, groups, **arguments)
    except (TypeError, ValueError) as error:
        raise StepError(
            f"the {name} cannot be made again over the composed model's parameters: {error}; write "
            f"run.optimizer({name}, ...) with its arguments instead"
        ) from error
    for number, (fqns, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        if not fqns:  # which matches nothing; schedulers count it
            made.param_groups.insert(number, group)
    _hold_frozen(made, names, context)
    is_scheduled = "step" in vars(optimizer)  # by which torch's schedulers see that it has stepped
    optimizer.__class__, optimizer.__dict__ = type(made), vars(made)
    if is_scheduled:
        _show_to_schedulers(optimizer)


def adopt_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler of torch that is of another optimizer than the one that was adopted."""
    if scheduler.optimizer is not optimizer:
        raise StepError(
            f"the {type(scheduler).__name__} is of another optimizer than the composition's; "
            "pass the optimizer to run.prepare, too, and before its scheduler"
        )


def _names_of_groups(optimizer: torch.optim.Optimizer, context: RunContext) -> list[list[str]]:
    """Return the FQNs of each group of an optimizer."""
    now = {id(parameter): fqn for fqn, parameter in context.named_parameters()}
    before = context.stash(GivenParameters)
    names: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        found = [now.get(id(parameter)) or before.name(parameter) for parameter in group["params"]]
        if None in found:
            raise StepError(
                f"group {number} of the {type(optimizer).__name__} has a tensor that is no parameter of the model that "
                "was composed; make the optimizer of the model that compose was given, or of run.model, and pass "
                "parameters of other modules to optimizer.add_param_group afterwards"
            )
        names.append([fqn for fqn in found if fqn is not None])
    held = {fqn for fqns in names for fqn in fqns}
    trained = [fqn for fqn, form in context.parameter_forms.items() if form.requires_grad]
    left_out = next((fqn for fqn in trained if fqn not in held), None)
    if left_out is not None:
        raise StepError(
            f'the {type(optimizer).__name__} leaves out "{left_out}", which requires gradients: all ranks would reduce '
            "gradients that nothing uses, or clears; freeze it before compose, with requires_grad_(False), or give it "
            "a group of this optimizer, as a composition has one"
        )
    return names


def _hold_frozen(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], context: RunContext) -> None:
    """Add to each group the parameters of the loop's that were frozen before compose: it may unfreeze them later."""
    forms, now = context.parameter_forms, dict(context.named_parameters())
    for fqns, group in zip(names, optimizer.param_groups, strict=True):
        frozen = [fqn for fqn in fqns if fqn in now and fqn in forms and not forms[fqn].requires_grad]
        group["params"] += [now[fqn] for fqn in frozen if now[fqn].is_floating_point()]


def _parameters_of(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls).parameters


def _exactly(fqns: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"\A(?:{'|'.join(map(re.escape, fqns))})\Z")


def _show_to_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's schedulers see steps of the composition's `step`: the first of a scheduler's calls puts itself there.

    A scheduler that is made and dropped does so, as theirs had with the optimizer's former `step`.
    """
    from torch.optim.lr_scheduler import LambdaLR

    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda step: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
