"""Copies of composed models, made by `copy.deepcopy`: averages, teachers and targets that a loop keeps beside a model.

A copy has modules, parameters and buffers of its own, sharded as the model's. Its forward is the model's, with the
copy's values in the place of the model's meanwhile: hooks, units and plans of a layout are made once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.composition.composed_model.unsaved_shards import state_of_rank
from composer3d.errors import StepError
from composer3d.step.evaluation import reshard_units
from composer3d.step.sharded_tensors.stored_rows import know_copy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["copy_composed", "is_copy"]

Values = list[tuple["Tensor", "Tensor"]]


def copy_composed(model: nn.Module, context: RunContext, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a composed model, without gradients of its own.

    Args:
        model: The only part of a run.
        context: Of the run.
        memo: Of `copy.deepcopy`.

    Memory: this rank's shards once more; during a forward of the copy twice. Collectives: those of the forward.
    """
    reshard_units(context.parts)
    return _copy(model, _Source(model=model, context=context), memo)


def is_copy(module: nn.Module) -> bool:
    """Return whether a module is a copy of a composed one, or of a module in it."""
    return isinstance(module, _Copied)


def _copy(model: nn.Module, source: _Source, memo: dict[int, Any]) -> Any:
    """Return a copy of a composed model, or of a copy of it, or of a module in that."""
    fqns = {id(parameter): fqn for fqn, parameter in source.model.named_parameters()}
    for parameter, own in zip(model.parameters(), _original_of(model).parameters(), strict=True):
        memo[id(parameter)] = copied = _copied_parameter(parameter)
        know_copy(source.context, fqns[id(own)], copied)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    for module in model.modules():
        memo[id(module)] = _empty_copy(_original_of(module))
    for module in model.modules():
        _fill(memo[id(module)], module, source, memo)
    return memo[id(model)]


def _original_of(module: nn.Module) -> Any:
    return vars(module)["_composer3d_copied"][1].module if isinstance(module, _Copied) else module


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The composed model of a copy, which copies of the copy share."""

    model: nn.Module
    context: RunContext

    def call(self, copied: nn.Module, original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module with the values and modes of its copy."""
        import torch

        _refuse_gradients(copied, args, kwargs)
        reshard_units(self.context.parts)
        with torch.no_grad(), _modes(copied, original), _values(_pairs(copied, original)):
            try:
                return original(*args, **kwargs)
            finally:
                reshard_units(self.context.parts)


@dataclass(frozen=True, kw_only=True)
class _Original:
    """The module that a copy's module was made of, which is none of the copy's own."""

    module: nn.Module


class _Copied:
    """Differences of a copy's modules from those that they were made of."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's forward with the copy's values."""
        source, original = vars(self)["_composer3d_copied"]
        return source.call(self, original.module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self
        source, _ = vars(module)["_composer3d_copied"]
        reshard_units(source.context.parts)
        return _copy(module, source, memo)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shards, which torch.save refuses."""
        state: Any = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        is_whole_call = not args and not kwargs.get("prefix") and kwargs.get("destination") is None
        return state_of_rank(state) if is_whole_call else state


def _copied_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same values and placements, with what attributes the loop gave it."""
    from torch import nn

    copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not name.startswith("_"):
            setattr(copied, name, value)
    return copied


def _empty_copy(original: nn.Module) -> Any:
    """Return a module of the class that a module had before it was composed."""
    base = torch_compat.class_before_units(original)
    cls: Any = type(base.__name__, (_Copied, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})
    return cls.__new__(cls)


def _fill(copied: Any, module: nn.Module, source: _Source, memo: dict[int, Any]) -> None:
    """Give a copied module its parameters, buffers and modules, and what attributes a module has of its own."""
    from torch import nn

    nn.Module.__init__(copied)
    names = {*vars(copied), "forward", "_compiled_call_impl", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
    for name, value in vars(module).items():
        if name not in names and not name.startswith(("__", "_composer3d_")):
            vars(copied)[name] = copy.deepcopy(value, memo)
    for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(copied)[kind] = copy.deepcopy(vars(module)[kind], memo)
    vars(copied)["training"] = module.training
    vars(copied)["_composer3d_copied"] = (source, _Original(module=_original_of(module)))


def _refuse_gradients(copied: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a forward of a copy that would have gradients on one device.

    Raises:
        StepError: With what to write.
    """
    import torch

    if not torch.is_grad_enabled():
        return
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in torch_compat.tree_leaves((args, kwargs))):
        raise StepError(
            "a copy of a composed model computes no gradients, and its input needs some; call it with detached inputs "
            "under torch.no_grad(), or compose a second model from its weights"
        )
    if any(parameter.requires_grad for parameter in copied.parameters()):
        raise StepError(
            "a copy of a composed model computes no gradients; call it under torch.no_grad(), or write "
            "copied.requires_grad_(False) once, or compose a second model from its weights"
        )


@contextlib.contextmanager
def _modes(copied: nn.Module, original: nn.Module) -> Iterator[None]:
    """Let a module and those in it train, or evaluate, as their copies do."""
    before = [(module, module.training) for module in original.modules()]
    for module, twin in zip(original.modules(), copied.modules(), strict=True):
        module.training = twin.training
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _pairs(copied: nn.Module, original: nn.Module) -> tuple[Values, Values]:
    """Return local tensors of parameters, and of buffers, with those of the copy."""
    found: list[Values] = []
    own: Callable[[nn.Module], Any]
    for own in (lambda module: module.parameters(), lambda module: module.buffers()):
        both = zip(own(original), own(copied), strict=True)
        found.append([(torch_compat.local_of(a.detach()), torch_compat.local_of(b.detach())) for a, b in both])
    return found[0], found[1]


@contextlib.contextmanager
def _values(pairs: tuple[Values, Values]) -> Iterator[None]:
    """Exchange the values of tensors and of their copies; what a forward writes into buffers is the copy's.

    A graph that has saved a tensor finds it as it was.
    """
    parameters, buffers = pairs
    everything = parameters + buffers
    with torch_compat.unchanged_versions([own for own, _ in everything]):
        before = [own.clone() for own, _ in everything]
        for own, value in everything:
            own.copy_(value)
    try:
        yield
    finally:
        for own, value in buffers:
            value.copy_(own)
        with torch_compat.unchanged_versions([own for own, _ in everything]):
            for (own, _), value in zip(everything, before, strict=True):
                own.copy_(value)
