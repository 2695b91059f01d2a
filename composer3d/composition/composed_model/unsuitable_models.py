"""Models that cannot be composed as they are: unreadable, compiled or wrapped, sharded already, or composed before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from composer3d.composition.composed_model.copied_models import is_copy
from composer3d.errors import TransformError
from composer3d.initialisation import unreadable
from composer3d.registry import Catalogue

if TYPE_CHECKING:
    from torch import nn

__all__ = ["mark_composed", "refuse_unsuitable"]

# On the module itself, so that a deep copy, whose parameters are as sharded, has it too.
_MARK = "_composer3d_composed"


def mark_composed(model: nn.Module) -> None:
    """Note on a module that transforms have changed it; closing the composition does not take them back."""
    setattr(model, _MARK, True)


def refuse_unsuitable(model: nn.Module, *, is_alone: bool = True) -> None:
    """Refuse a model whose names, parameters or hooks are not those that its code made, or that cannot be called.

    Args:
        model: Of all stages.
        is_alone: Whether one rank runs it, which needs no forward that units and outputs go through.

    Raises:
        TransformError: With the FQN at fault, and what to pass instead.
    """
    if (what := unreadable(model)) is not None:
        raise TransformError(what)
    _refuse_compiled(model)
    _refuse_scripted(model)
    _refuse_replicated(model)
    _refuse_sharded(model)
    if not is_alone:
        _refuse_container(model)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse wrappers under which every parameter has another name, in checkpoints and patterns too."""
    for fqn, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            what = f'"{fqn}"' if fqn else "the model"
            tables = Catalogue.installed().offering("is_compiled", True) or "the table of a plugin"
            raise TransformError(
                f'torch.compile wrapped {what} before compose, so that its parameters are called "_orig_mod.*"; hand '
                f"compose the model as it was, and write {tables} into the manifest, which compiles its blocks"
            )


def _refuse_scripted(model: nn.Module) -> None:
    """Refuse modules of torch.jit, whose forwards no plugin can see or replace."""
    import torch

    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f'"{fqn}"' if fqn else "the model"
            raise TransformError(
                f"torch.jit has compiled {what} before compose, and runs it where no plugin sees what it does; hand "
                "compose the module as it was, without torch.jit.script and torch.jit.trace"
            )


def _refuse_replicated(model: nn.Module) -> None:
    """Refuse torch's wrappers that replicate a module, which average gradients once more."""
    from torch import nn

    for fqn, module in model.named_modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            what = f'"{fqn}"' if fqn else "the model"
            tables = Catalogue.installed().offering("zero", 0) or "the table of a plugin"
            raise TransformError(
                f"{type(module).__name__} wraps {what} before compose; hand compose what it wraps, its .module, and "
                f"write {tables} into the manifest"
            )


def _refuse_sharded(model: nn.Module) -> None:
    """Refuse parameters that are shards: a plan, a checkpoint or a comparison of ranks would take them for whole."""
    # To import it takes long, and where nobody has there are none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    shard = next((fqn for fqn, tensor in model.named_parameters() if isinstance(tensor, kind)), None)
    if _MARK in vars(model) or is_copy(model):
        still = "" if shard is None else f', and its parameters are still the shards of then ("{shard}" is a DTensor)'
        raise TransformError(
            f"compose was called with this module before{still}; close does not take back what was done to its "
            "modules. Hand compose a function that builds the model, or a module that is built anew, and for the "
            "weights trained so far call run.save(...) before close and run.load(...) after compose"
        )
    if shard is not None:
        raise TransformError(
            f'"{shard}" is a DTensor before compose, so something else sharded the model; hand compose the model as '
            "it was, and write the sharding into the manifest"
        )


def _refuse_container(model: nn.Module) -> None:
    """Refuse a list or dict of modules, which has no forward for units and outputs to go through."""
    from torch import nn

    containers = nn.ModuleList, nn.ModuleDict
    if isinstance(model, containers) and type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise TransformError(
            f"the model is a {type(model).__name__} without a forward, through which units gather their weights and "
            "outputs are followed; compose each of its modules by itself, or hand compose a module with a forward that "
            "calls them"
        )
