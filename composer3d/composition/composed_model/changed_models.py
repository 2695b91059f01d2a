"""Models that a loop changes after compose: modules put in, parameters unfrozen, parameters passed for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.step.sharded_tensors.passed_parameters import refuse_passed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.interfaces import Part

__all__ = ["ComposedModules", "composed_modules", "refuse_added", "refuse_passed_parameters", "refuse_unfrozen"]


# Each with the names of its own parameters.
ComposedModules: TypeAlias = "Sequence[tuple[nn.Module, frozenset[str]]]"


def composed_modules(parts: Sequence[Part]) -> ComposedModules:
    """Return the modules of all parts, each with the names of its own parameters."""
    return [(module, frozenset(module._parameters)) for part in parts for module in part.module.modules()]


def refuse_added(parts: Sequence[Part], known: ComposedModules) -> None:
    """Refuse parameters that were put into the model after it was composed.

    Args:
        parts: Of the composition.
        known: From `composed_modules`, when it was composed.

    Raises:
        StepError: With the first one's FQN: no plugin has sharded it, and none would reduce its gradient.
    """
    names = {id(module): own for module, own in known}
    for part in parts:
        for fqn, module in part.module.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and name not in names.get(id(module), frozenset()):
                    whole = f"{fqn}.{name}" if fqn else name
                    raise StepError(
                        f'the parameter "{whole}" was put into the model after compose: no plugin has sharded it, and '
                        "none reduces its gradient, so ranks would train different ones; change the model before "
                        "compose, for example in the factory that compose is given; gradients of a module that is no "
                        "part of the model are averaged, where optimizer.add_param_group is given its parameters"
                    )


def refuse_unfrozen(parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that refuses gradients of parameters which were frozen when the optimizer was made.

    Args:
        parts: Of the composition.
        optimizer: That has the others.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [
        (fqn, parameter)
        for part in parts
        for fqn, parameter in part.module.named_parameters()
        if id(parameter) not in held
    ]

    def check() -> None:
        unfrozen = [(fqn, p) for fqn, p in left_out if p.requires_grad and p.grad is not None]
        added = {id(p) for group in optimizer.param_groups for p in group["params"]} if unfrozen else ()
        for fqn, parameter in unfrozen:
            if id(parameter) not in added:
                raise StepError(
                    f'"{fqn}" was frozen when the optimizer was made, which does not have it, so that it would stay as '
                    "it is; add it by optimizer.add_param_group, let it require gradients before run.optimizer(...), "
                    "and freeze it afterwards, or pass run.prepare(...) an optimizer of all parameters, frozen ones too"
                )

    return check


def refuse_passed_parameters(module: nn.Module) -> Callable[[], None]:
    """Return a function that refuses tensors in the place of parameters, as `torch.func.functional_call` puts them.

    Data parallelism gathers its own parameters over them, and the call would compute with those, silently.

    Args:
        module: The whole model.
    """
    import torch

    places: list[tuple[Mapping[str, Any], str, str, int]] = [
        (owner._parameters, name, f"{fqn}.{name}" if fqn else name, id(parameter))
        for fqn, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]

    def check() -> None:
        gathered: set[int] | None = None
        for parameters, name, fqn, own in places:
            found = parameters.get(name)
            if found is None or id(found) == own:
                continue
            if gathered is None:
                gathered = {id(t) for each in module.modules() for t in torch_compat.fsdp_buffers(each)}
            is_plain = hasattr(module, "reshard") and not hasattr(found, "full_tensor")
            if not isinstance(found, torch.nn.Parameter) or (is_plain and id(found) not in gathered):
                refuse_passed(fqn)

    return check
