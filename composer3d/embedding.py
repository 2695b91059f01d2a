"""Hooks on the model of a loop that runs its own forward: random streams, gathered parameters, and what it saves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d import spans
from composer3d.evaluation import let_go

if TYPE_CHECKING:
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.step import StepEngine

__all__ = ["watch_model"]


def watch_model(module: nn.Module, engine: StepEngine, context: RunContext) -> None:
    """Attach hooks to the whole model of a composition without a schedule.

    They are functions and look at the module that they are called for: `copy.deepcopy` of the model passes them on as
    they are, and on a copy they do nothing.

    Args:
        module: The only part.
        engine: Runs its steps.
        context: Frozen.
    """
    import torch

    normal: list[contextlib.ExitStack] = []

    def enter_normal_mode(owner: nn.Module, _: tuple[Any, ...]) -> None:
        # FSDP2 makes the tensors that it gathers into at the first forward, and cannot train on inference tensors.
        if owner is module and torch.is_inference_mode_enabled():
            normal.append(contextlib.ExitStack())
            normal[-1].enter_context(torch.inference_mode(False))
            normal[-1].enter_context(torch.no_grad())

    def before(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if owner is module:
            engine.enter_own_forward(args, kwargs)

    def after(owner: nn.Module, *_: Any) -> None:
        if owner is module:
            engine.leave_own_forward()
            if normal:
                normal.pop().close()

    def reading(owner: nn.Module, *_: Any) -> None:
        if owner is module:
            let_go(context.parts)

    module.register_forward_pre_hook(enter_normal_mode, prepend=True)
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
    module.register_state_dict_pre_hook(reading)
    spans.watch_own_forward(module, context, lambda: engine.is_own_forward)
