"""Buffers that a forward changes, such as running statistics: one update a step, recomputation or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["keep_buffers"]


def keep_buffers(block: nn.Module) -> None:
    """Let a recomputation of a block read and write copies of the buffers that are part of its state.

    torch's checkpoints leave that to the caller: statistics of a batch norm inside would be updated twice, once with
    each computation of the same batch.

    Args:
        block: Its forward is replaced, keeping its name, if there are such buffers.

    Memory: a copy of those buffers while the block is computed.
    """
    import torch

    state = block.state_dict(keep_vars=True)
    names = [fqn for fqn, _ in block.named_buffers() if fqn in state]
    if not names:
        return
    places = [(block.get_submodule(fqn.rpartition(".")[0]), fqn.rpartition(".")[2]) for fqn in names]
    module: Any = block
    forward = module.forward

    @functools.wraps(forward)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        held = [getattr(owner, name) for owner, name in places]
        # In the forward too: selective checkpoints want the same operators in both.
        copies = [buffer.clone() for buffer in held]
        if not torch_compat.in_backward():
            return forward(*args, **kwargs)
        _put(places, copies)
        try:
            return forward(*args, **kwargs)
        finally:
            # Also where a recomputation stops early, once it has the tensors that it is for.
            _put(places, held)

    module.forward = keeping


def _put(places: Sequence[tuple[nn.Module, str]], buffers: Sequence[Tensor]) -> None:
    for (owner, name), buffer in zip(places, buffers, strict=True):
        setattr(owner, name, buffer)
