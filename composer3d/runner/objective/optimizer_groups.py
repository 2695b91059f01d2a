"""The optimizer of a run: class, parameter groups, and which parameters are not decayed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import pieces_of
from composer3d.errors import ComposerError, ManifestError, PatternError, PluginError, Problem
from composer3d.manifest import Manifest, resolve_reference, search
from composer3d.step import exclusions

if TYPE_CHECKING:
    import torch

    from composer3d import Composition, RunContext
    from composer3d.runner.runner_tables import OptimizerTable

__all__ = ["describe_groups", "in_backward_problems", "make_optimizer", "optimizer_class", "untrained_problem"]


def make_optimizer(run: Composition, manifest: Manifest, *, in_backward: bool | None = None) -> torch.optim.Optimizer:
    """Make the optimizer that `[optimizer]` describes.

    Args:
        run: Composed; its parameters are grouped.
        manifest: With the runner's tables.
        in_backward: Whether it steps in the backward; None is as the manifest says.

    Raises:
        ManifestError: At the line of what is wrong: a class that cannot be imported or takes no such argument, a group
            that matches nothing, no parameter to train.
    """
    document, table = manifest.document, manifest.tables["optimizer"]
    steps_there = table.in_backward if in_backward is None else in_backward
    if steps_there and (problems := in_backward_problems(manifest, run.context, has_schedule=False)):
        raise ManifestError(problems)
    # A stage may hold frozen parameters alone.
    whole = run.named_parameters() if run.parts[0].num_stages == 1 else run.context.parameter_forms.items()
    if (problem := untrained_problem(manifest, whole)) is not None:
        raise ManifestError([problem])
    key = "use"
    try:
        cls, defaults = optimizer_class(table, document.folder)
        key = "no_decay"
        if table.no_decay is not None and not any(search(table.no_decay, f) for f in run.context.parameter_fqns):
            raise PatternError(table.no_decay, "no_decay is a regular expression, searched in FQNs")
        num_dims = {fqn: parameter.ndim for fqn, parameter in run.named_parameters() if parameter.requires_grad}
        key = "groups"
        groups = describe_groups(table, num_dims, defaults)
        if table.use == "muon":
            from composer3d.runner.objective.muon import group_matrices, matrices_of

            key = "use" if table.matrices is None else "matrices"
            groups = group_matrices(groups, matrices_of(run, table.matrices))
        key = "in_backward" if steps_there else "use"
        optimizer = run.optimizer(cls, groups=groups, in_backward=steps_there, **defaults)
        _refuse_unknown(table, optimizer)
        return optimizer
    except ComposerError as error:
        raise ManifestError([document.problem(("optimizer", key), str(error))]) from error


def untrained_problem(manifest: Manifest, parameters: Iterable[tuple[str, Any]]) -> Problem | None:
    """Return the problem of parameters none of which is trained.

    Args:
        manifest: With the runner's tables.
        parameters: Of the model, or their forms, with their names.
    """
    held = [parameter for _, parameter in parameters]
    if any(parameter.requires_grad for parameter in held):
        return None
    if not held:
        return manifest.document.problem(("model", "use"), "the model has no parameter, so there is nothing to train")
    if not manifest.tables["train"].frozen:
        message = f"none of the model's {len(held)} parameters has requires_grad, so there is nothing to train"
        return manifest.document.problem(("model", "use"), message)
    return manifest.document.problem(("train", "frozen"), "frozen leaves no parameter to train")


def in_backward_problems(manifest: Manifest, context: RunContext, *, has_schedule: bool) -> list[Problem]:
    """Return what of a manifest cannot be together with `optimizer.in_backward`.

    Args:
        manifest: With the runner's tables.
        context: Of a composition whose plugins are configured.
        has_schedule: Whether a plugin schedules micro-batches.
    """
    document, tables = manifest.document, manifest.tables
    if not tables["optimizer"].in_backward:
        return []
    train, own, found = tables["train"], ("optimizer", "in_backward"), []
    if not math.isinf(train.grad_clip):
        found.append(
            (
                ("train", "grad_clip") if document.get(("train", "grad_clip")) is not None else own,
                f"grad_clip = {train.grad_clip:g} needs the norm of all gradients, and in_backward waits for none",
                "write train.grad_clip = inf, which only measures it",
            )
        )
    if tables["stability"].on_nonfinite == "skip":
        message = 'on_nonfinite = "skip" would have to take back what optimizer.in_backward has stepped'
        found.append((("stability", "on_nonfinite"), message, 'write "stop"'))
    pieces = pieces_of(context)
    num_microbatches = pieces.most * train.num_microbatches(pieces.total * context.layout.num_groups)
    if num_microbatches > 1:
        message = f"a gradient is complete after all {num_microbatches} micro-batches of a step, not after the first"
        found.append((own, message, "raise train.microbatch so that a step has one, and recompute activations"))
    found += [(own, reason, "remove one of the two") for reason in exclusions(context, has_schedule=has_schedule)]
    return [
        document.problem(path, f"in_backward cannot be: {message}" if path == own else message, hint=hint)
        for path, message, hint in found
    ]


def _refuse_unknown(table: OptimizerTable, optimizer: torch.optim.Optimizer) -> None:
    """Refuse keys of groups that the optimizer would ignore."""
    for group in table.groups:
        stated = [*group.args, *(["weight_decay"] if group.weight_decay is not None else [])]
        unknown = [key for key in stated if key not in optimizer.defaults]
        if unknown:
            hint = f"it has {', '.join(optimizer.defaults)}"
            raise PluginError(f'{type(optimizer).__name__} has no hyperparameter "{unknown[0]}"', hint=hint)


def optimizer_class(table: OptimizerTable, folder: Path) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and its arguments.

    AdamW runs fused, in one kernel for all parameters (measured under FSDP2: 0.7 ms where foreach takes 1.3). torch's
    fused SGD has no rule for DTensors, so SGD runs as foreach. `args` may choose the other.

    Args:
        table: `[optimizer]`.
        folder: Of the manifest.

    Raises:
        ReferenceFailure: The class cannot be imported.
        PluginError: It is no optimizer, or has no such argument.
    """
    import torch

    stated = {key: getattr(table, key) for key in ("weight_decay", "betas", "eps", "momentum", "nesterov")}
    arguments = {"lr": table.lr} | {key: value for key, value in stated.items() if value is not None}
    if table.use == "adamw":
        cls: Any = torch.optim.AdamW
        arguments = {"weight_decay": 0.1, "betas": (0.9, 0.95), "fused": True} | arguments
    elif table.use == "sgd":
        cls = torch.optim.SGD
        arguments = {"momentum": 0.9, "foreach": True} | arguments
    elif table.use == "muon":
        from composer3d.runner.objective.muon import Muon

        cls = Muon
        arguments = {"fused": True} | arguments
    else:
        cls = resolve_reference(table.use, folder)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise PluginError(f'"{table.use}" is not a torch.optim.Optimizer')
    if table.args.keys() & {"fused", "foreach"}:
        arguments = {key: value for key, value in arguments.items() if key not in ("fused", "foreach")}
    arguments |= table.args
    known = inspect.signature(cls).parameters
    unknown = [key for key in arguments if key not in known]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        raise PluginError(f'{cls.__name__} takes no argument "{unknown[0]}"', hint=f"it takes {', '.join(known)}")
    if "weight_decay" in known and isinstance(own := known["weight_decay"].default, int | float):
        arguments.setdefault("weight_decay", own)
    return cls, arguments


def describe_groups(
    table: OptimizerTable, num_dims: Mapping[str, int], defaults: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the groups as `Composition.optimizer` takes them.

    Every group that does not state a weight decay is taken in two: without decay for norms and biases, else with it.

    Args:
        table: `[optimizer]`.
        num_dims: Of every parameter that is trained on this rank, by FQN.
        defaults: The optimizer's arguments.
    """
    spared = [fqn for fqn, num in num_dims.items() if _is_spared(fqn, num, table.no_decay)]
    result: list[dict[str, Any]] = []
    for group in table.groups:
        options = {key: value for key in ("lr", "weight_decay") if (value := getattr(group, key)) is not None}
        options |= group.args
        inside = [fqn for fqn in spared if search(group.match, fqn)]
        if inside and "weight_decay" not in options:
            result.append({"match": _exactly(inside), **options, "weight_decay": 0.0})
        result.append({"match": group.match, **options})
    if spared and (table.no_decay is not None or defaults.get("weight_decay")):
        result.append({"match": _exactly(spared), "weight_decay": 0.0})
    return result


def _is_spared(fqn: str, num_dims: int, no_decay: str | None) -> bool:
    return num_dims < 2 if no_decay is None else search(no_decay, fqn)


def _exactly(fqns: list[str]) -> str:
    return f"^(?:{'|'.join(re.escape(fqn) for fqn in fqns)})$"
