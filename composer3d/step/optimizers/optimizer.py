"""The optimizer of a composition: parameters grouped by name, and a `step` that runs inside the composition's step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import PatternError, PluginError, StepError
from composer3d.manifest.regular_expressions import Expression
from composer3d.step.optimizers.kinds import by_kind
from composer3d.step.optimizers.optimizer_probe import probe_optimizer
from composer3d.step.optimizers.shard_step import on_shards, steps_each_element
from composer3d.step.optimizers.unit_steps import SteppedUnits, refused_in_units
from composer3d.step.sharded_tensors.whole_operators import OWN_SCALER

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.hooks import Hooks

__all__ = ["compose_step", "group_parameters", "make_optimizer"]

_CLOSURE = (
    "whose forward and backward a composed step cannot run again, as LBFGS would: call the closure's lines, with "
    "run.backward(loss), before optimizer.step(), and pass none"
)


def make_optimizer(
    cls: type[torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    *,
    context: RunContext,
    hooks: Hooks,
) -> tuple[str, torch.optim.Optimizer]:
    """Make the optimizer of a run; see `Composition.optimizer`.

    Returns:
        The plugin that answered the hook, empty if none did, and the optimizer.

    Raises:
        StepError: The class updates shards differently from full parameters.
        PluginError: Units are to be stepped by themselves, and nothing says that the class can.
    """
    trained = [fqn for fqn, form in context.parameter_forms.items() if form.requires_grad]
    named = context.named_parameters()
    described = group_parameters(named, groups, known=context.parameter_fqns, trained=trained)
    described = [{**defaults, **group} for group in described]
    made = hooks.optimizer(context, cls, described)
    refused = refused_in_units(cls if made is None else type(made[1]))
    if refused and context.stash(SteppedUnits).units:
        raise PluginError(refused)
    if made is not None:
        return made
    if context.purpose == "run":  # verify compares all that it does
        probe_optimizer(cls, [p for group in described for p in group["params"]], defaults)
    return "", cls(described, **defaults)


def group_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]],
    groups: Sequence[Mapping[str, Any]],
    *,
    known: Sequence[str],
    trained: Sequence[str],
) -> list[dict[str, Any]]:
    """Sort trainable parameters into groups; the first match wins, and parameters without a match come last.

    Args:
        parameters: This rank's, by FQN.
        groups: Each with `match`, a regular expression that is searched in FQNs, and hyperparameters.
        known: All FQNs of the whole model; a stage may hold none of a group's parameters.
        trained: Those that were trainable before the split.

    Returns:
        Groups with `params`: all that are given, empty ones too, which schedulers count; and one of what matches none
        of them, if the whole model has such parameters, or no group is given.

    Raises:
        PatternError: A group matches nothing in the whole model.
        StepError: A group has no `match`, or one that is no regular expression.
    """
    expressions = [_expression(number, group) for number, group in enumerate(groups)]
    members: list[dict[str, Any]] = [{**group, "params": []} for group in groups] + [{"params": []}]
    for group in members[:-1]:
        del group["match"]
    for expression in expressions:
        if not any(expression.search(name) for name in known):
            raise PatternError(expression.pattern, "the group would be empty; `match` is a regular expression")
    for fqn, parameter in parameters:
        if parameter.requires_grad:
            places = [index for index, expression in enumerate(expressions) if expression.search(fqn)]
            members[places[0] if places else -1]["params"].append(parameter)
    has_others = any(not any(expression.search(fqn) for expression in expressions) for fqn in trained)
    return members if has_others or members[-1]["params"] or not groups else members[:-1]


def _expression(number: int, group: Mapping[str, Any]) -> re.Pattern[str] | Expression:
    """Return the compiled `match` of a group; groups of torch name tensors, and a sharded model has others."""
    how = 'a group is {"match": REGULAR_EXPRESSION, ...}, searched in FQNs, with the hyperparameters of what matches'
    if not isinstance(group, Mapping) or not isinstance(group.get("match"), str | re.Pattern):
        found = f"has {', '.join(map(repr, group)) or 'nothing'}" if isinstance(group, Mapping) else "is no mapping"
        raise StepError(f"run.optimizer(groups=...): group {number} {found}, and no text `match`; {how}")
    if isinstance(group["match"], re.Pattern):
        return group["match"]
    try:
        return Expression(group["match"])
    except ValueError as error:
        wrong = f'`match` of group {number}, "{group["match"]}", is no regular expression: {error}'
        raise StepError(f"run.optimizer(groups=...): {wrong}; {how}") from None


def compose_step(
    optimizer: torch.optim.Optimizer,
    run: Callable[[Callable[[], Any]], Any],
    *,
    clear: Callable[[], bool],
    added: Callable[[Sequence[nn.Parameter]], None],
    in_units: Callable[[Callable[[Any], Any]], Callable[[Any], Any]],
) -> torch.optim.Optimizer:
    """Give an optimizer a subclass whose `step` is run by the composition, and whose `zero_grad` may wait.

    A subclass, because learning-rate schedulers require a real Optimizer with a bound `step`, and isinstance checks
    the requested class.

    Args:
        optimizer: Made, not yet stepped.
        run: Called with the optimizer's own step; decides whether and when it runs.
        clear: Called before gradients are cleared; returns whether they are to be.
        added: Called with the parameters of a group that the loop adds.
        in_units: Given a step without hooks, returns one that steps units by themselves where a plugin has some.
    """
    cls = type(optimizer)
    inner: Any = cls.step
    if getattr(inner, "hooked", False):  # wrapped once by torch, for hooks and profiles
        bare = by_kind(inner.__wrapped__)
        bare = on_shards(bare) if steps_each_element(cls) else bare
        inner = cls.profile_hook_step(in_units(bare))

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if clear():
            cls.zero_grad(self, set_to_none)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise StepError(f"{cls.__name__}.step was given a closure, {_CLOSURE}")
        return run(lambda: inner(self))

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        cls.add_param_group(self, param_group)
        added(self.param_groups[-1]["params"])

    def scaled_step(self: torch.optim.Optimizer) -> bool:
        raise StepError(OWN_SCALER)

    # torch's own wrapper around `step` (profiling, hooks) is already in `inner`.
    step.hooked = True  # type: ignore[attr-defined]
    # Checkpoints unwrap `step` down to the bare one: initialising the state must not run hooks on steps.
    step.__wrapped__ = inner  # type: ignore[attr-defined]
    optimizer.__class__ = type(
        cls.__name__,
        (cls,),
        {
            "step": step,
            "zero_grad": zero_grad,
            "add_param_group": add_param_group,
            torch_compat.SCALED_STEP: property(scaled_step),
            "__module__": cls.__module__,
        },
    )
    return optimizer
