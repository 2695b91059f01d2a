"""Tensors that plugins derive from parameters, such as float8 scales: stale ones are found by recomputation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d.step import local
from composer3d.torch_compat import held_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d import Composition

__all__ = ["stale_values"]


def stale_values(run: Composition) -> tuple[str, ...]:
    """Return the derived values that change if all of them are recomputed, as `FQN.attribute`.

    The parameters have not changed since the last step ended, so no derived value may: one that does was computed from
    other parameters than those the next step begins with. Buffers, and tensors that are attributes of parameters, are
    compared.

    Collectives: those of the plugins' actions on final parameters.
    """
    before = {name: _digest(tensor) for name, tensor in _beside(run)}
    run.parameters_changed()
    return tuple(name for name, tensor in _beside(run) if name in before and _digest(tensor) != before[name])


def _beside(run: Composition) -> Iterator[tuple[str, Tensor]]:
    import torch

    for part in run.parts:
        yield from part.module.named_buffers()
    for fqn, parameter in run.named_parameters():
        for holder in (parameter, held_tensor(parameter)):
            for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                if isinstance(value, torch.Tensor) and value.shape != holder.shape and not name.startswith("grad"):
                    yield f"{fqn}.{name.strip('_')}", value


def _digest(tensor: Any) -> str:
    import torch

    values = local(tensor.detach()).cpu().contiguous()
    return hashlib.blake2b(values.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=12).hexdigest()
