"""Plain state dicts, of one device's model, that cannot be loaded into a model whose parameters are sharded.

Others are: a whole tensor that is copied into a parameter is sharded there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d.errors import StepError
from composer3d.step.buffers import NOTHING, held_in_part
from composer3d.step.sharded_tensors.written_values import WrittenValues, is_compared
from composer3d.torch_compat import is_wrapper_subclass

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext

__all__ = ["leave_out_absent", "record_loaded", "refuse_replacing"]


def leave_out_absent(module: nn.Module, state: dict[str, Any], *, within: str, context: RunContext) -> None:
    """Take from a state dict of one device's model the parameters of experts in lists that other ranks hold.

    Args:
        module: Of the composed model, whose `load_state_dict` is called.
        state: As torch's `load_state_dict` copies it; is written.
        within: FQN of the module and a dot; empty for the model.
        context: Of the run.
    """
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for name in [name for name in state if name not in known]:
        own = held_in_part(context, within + name)
        if own is not None and own.held == NOTHING:
            del state[name]


def refuse_replacing(module: nn.Module, state: Mapping[str, Any], *, within: str, assigns: bool) -> None:
    """Refuse a state dict whose tensors would take the place of sharded ones, or cannot be copied into them.

    Args:
        module: Of the composed model, whose `load_state_dict` is called, resharded.
        state: As it was given.
        within: FQN of the module and a dot; empty for the model.
        assigns: Whether parameters are to be replaced instead of written.

    Raises:
        StepError: Parameters would be replaced, or are kept in a form that full tensors are not copied into.
    """
    import torch
    from torch.distributed.tensor import DTensor

    tensors: Mapping[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, own in tensors.items():
        full, fqn = state.get(name), within + name
        if not isinstance(own, DTensor) or not isinstance(full, torch.Tensor):
            continue
        if assigns:
            raise StepError(
                f'load_state_dict(assign=True) would put another tensor in the place of "{fqn}", which is sharded, and '
                "in that of the optimizer's; leave assign out"
            )
        if isinstance(full, DTensor) or full.shape != own.shape:  # of other shapes torch says what both are
            continue
        if is_wrapper_subclass(type(own.to_local())):
            raise StepError(
                f'"{fqn}" is kept as {type(own.to_local()).__name__}, which no plain tensor is copied into; load the '
                "weights into the model before compose, or a checkpoint of this run by run.load(...)"
            )


def record_loaded(module: nn.Module, state: Mapping[str, Any], *, within: str, context: RunContext) -> None:
    """Record what is loaded into plain parameters, which ranks then compare; writes into sharded ones are recorded.

    Args:
        module: Of the composed model, whose `load_state_dict` is called.
        state: As it was given.
        within: FQN of the module and a dot; empty for the model.
        context: Of the run.
    """
    import torch
    from torch.distributed.tensor import DTensor

    for name, own in module.named_parameters(remove_duplicate=False) if is_compared(context) else ():
        given = state.get(name)
        if not isinstance(given, torch.Tensor) or isinstance(own, DTensor):
            continue
        if context.parameter_mesh(within + name) is None:
            context.stash(WrittenValues).add(within + name, given)
