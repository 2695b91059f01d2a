"""Hooks on the model of a loop that runs its own forward: random streams, resharding, and its state dict."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from composer3d import torch_compat
from composer3d.composition.composed_model import span_hooks
from composer3d.composition.composed_model.changed_models import refuse_passed_parameters
from composer3d.composition.composed_model.copied_models import copy_composed
from composer3d.composition.composed_model.plain_states import leave_out_absent, record_loaded, refuse_replacing
from composer3d.composition.composed_model.second_derivatives import exchanging_axes, refuse_second_derivatives
from composer3d.composition.composed_model.unsaved_shards import refuse_saving_model, state_of_rank
from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.step.evaluation import reshard_units
from composer3d.step.loops.whole_gradients import refuse_rank_gradients
from composer3d.step.sharded_tensors.assigned_values import refuse_late_writes
from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.step.engine import StepEngine

__all__ = ["watch_model"]

Place = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], Mapping[str, Any]]]


def _is_bound(module: nn.Module) -> bool:
    """Return whether a copy would not be of its own: a unit of data parallelism, or a forward that is a closure."""
    forward = vars(module).get("forward")
    while isinstance(forward, functools.partial):
        forward = forward.func
    is_closure = isinstance(forward, types.FunctionType) and forward.__closure__ is not None
    own = getattr(getattr(type(module), "__deepcopy__", None), "__module__", "")
    return is_closure or hasattr(module, "reshard") or own.startswith("torch.distributed")


def watch_model(module: nn.Module, engine: StepEngine, context: RunContext, place: Place) -> None:
    """Attach hooks to the whole model of a composition without a schedule.

    They are functions that check the module they are called for: `copy.deepcopy` of the model keeps them, and on a copy
    they do nothing.

    Args:
        module: The only part.
        engine: Runs its steps.
        context: Frozen.
        place: Returns arguments of a forward that the loop runs itself as plugins place them.
    """
    vars(module)["compile"] = _refuse_compiling
    _watch_forwards(module, engine, context, place)
    _watch_reading(module, context)
    _watch_loading(module, engine, context)
    refuse_saving_model(module)
    torch_compat.call_within(module, engine.explaining)
    torch_compat.call_within(module, functools.partial(forward_hooks.calling, module))
    if any(_is_bound(each) for each in module.modules()):
        # Those of torch's data parallelism refuse; copy looks at the instance first.
        vars(module)["__deepcopy__"] = functools.partial(copy_composed, module, context)
    span_hooks.watch_own_forward(module, context, lambda: engine.state is not None and not engine.is_running)


def _watch_forwards(module: nn.Module, engine: StepEngine, context: RunContext, place: Place) -> None:
    """Begin and end the forwards that a loop runs itself."""
    import torch

    normal: list[contextlib.ExitStack] = []
    watch_gradients = _gradient_watch(engine, context)
    refuse_passed = refuse_passed_parameters(module)

    def enter_normal_mode(owner: nn.Module, _: tuple[Any, ...]) -> None:
        if owner is module and not engine.is_running:
            refuse_passed()  # before units gather their own parameters over what was passed
        # FSDP2 makes the tensors that it gathers into at the first forward, and cannot train on inference tensors.
        if owner is module and torch.is_inference_mode_enabled():
            normal.append(contextlib.ExitStack())
            normal[-1].enter_context(torch.inference_mode(False))
            normal[-1].enter_context(torch.no_grad())

    def before(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if owner is not module:
            return None
        refuse_late_writes(context)
        engine.criterion.inside.end()
        engine.enter_own_forward(args, kwargs, trains=owner.training and torch.is_grad_enabled())
        return None if engine.is_running else place(args, kwargs)

    def after(owner: nn.Module, _: Any, output: Any) -> None:
        if owner is module:
            watch_gradients(output)
            engine.leave_own_forward()
            has_failed = output is None and sys.exc_info()[1] is not None
            if not (engine.is_running or has_failed):
                engine.criterion.inside.begin()
                engine.activations.follow_loop(output)
            if normal:
                normal.pop().close()

    module.register_forward_pre_hook(torch_compat.uncompiled(enter_normal_mode), prepend=True)
    module.register_forward_pre_hook(torch_compat.uncompiled(before), with_kwargs=True)
    module.register_forward_hook(torch_compat.uncompiled(after), always_call=True)


def _watch_reading(module: nn.Module, context: RunContext) -> None:
    """Reshard before a state is read, and mark what was read of shards."""

    def reading(owner: nn.Module, *_: Any) -> None:
        if owner is module:
            reshard_units(context.parts)

    def read(owner: nn.Module, state: Any, prefix: str, _: Any) -> Any:
        return state_of_rank(state) if owner is module and not prefix else state

    module.register_state_dict_pre_hook(reading)
    torch_compat.on_state_dict(module, read)


def _refuse_compiling(*args: Any, **options: Any) -> NoReturn:
    raise StepError(
        "run.model.compile() would compile what a step does around the model's forward; name a plugin of [scheduling] "
        "that compiles blocks, or write model = torch.compile(run.model)"
    )


def _gradient_watch(engine: StepEngine, context: RunContext) -> Callable[[Any], None]:
    """Return what refuses gradients of a forward's output that are others than the loop takes them for."""
    import torch

    axes = exchanging_axes(context.layout)
    has_others = context.layout.degree(Role.BATCH, Role.SEQUENCE) > 1

    def watch(output: Any) -> None:
        if axes and torch.is_grad_enabled():
            refuse_second_derivatives(output, axes)
        if has_others and torch.is_grad_enabled() and not engine.is_running:
            refuse_rank_gradients(output, context, lambda: engine.units.takes_gradients)

    return watch


def _watch_loading(module: nn.Module, engine: StepEngine, context: RunContext) -> None:
    """Let `load_state_dict`, of the model or of a module in it, take the tensors of one device's model."""
    names = {id(each): f"{fqn}." if fqn else "" for fqn, each in module.named_modules()}
    called: list[nn.Module] = []

    def loading(owner: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any) -> None:
        if id(owner) in names and not prefix:
            called[:] = [owner]
            reshard_units(context.parts)
            leave_out_absent(owner, state, within=names[id(owner)], context=context)
            assigns = bool(metadata.get("assign_to_params_buffers"))
            refuse_replacing(owner, state, within=names[id(owner)], assigns=assigns)
            record_loaded(owner, state, within=names[id(owner)], context=context)

    def loaded(owner: nn.Module, _: Any) -> None:
        if called and owner is called[0]:
            called.clear()
            if engine.state is None or engine.own_steps.is_open:
                engine.parameters_loaded()

    for each in module.modules():
        each.register_load_state_dict_pre_hook(loading)
        each.register_load_state_dict_post_hook(loaded)
