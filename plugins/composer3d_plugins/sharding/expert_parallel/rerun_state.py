"""State that a forward changes, taken back before it runs again, and rows of two runs compared."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["BlockState", "differ", "has_values", "random_states", "restore_random_states"]


def random_states(given: Sequence[Tensor]) -> list[tuple[torch.device | None, Tensor]]:
    """Return the states of the generators that a block may draw from."""
    import torch

    devices = {x.device for x in given if x.device.type == "cuda"}
    return [(None, torch.get_rng_state()), *((device, torch.cuda.get_rng_state(device)) for device in devices)]


class BlockState:
    """State of a block's modules beside parameters: buffers, and attributes such as a list of losses.

    Args:
        block: Any.
        outside: Puts back what its code has written to outside of it, if it may have.
    """

    def __init__(self, block: nn.Module, outside: Callable[[], None] = lambda: None) -> None:
        from torch import nn

        self._outside = outside
        self._of_torch = vars(nn.Module()).keys()  # hooks, parameters and modules among them
        self._buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
        self._attributes = [
            (vars(module), {name: value for name, value in vars(module).items() if name not in self._of_torch})
            for module in block.modules()
        ]
        kept = [value for _, before in self._attributes for value in before.values()]
        self._containers = [(each, copy.copy(each)) for each in kept if isinstance(each, list | dict | set | deque)]

    def restore(self) -> None:
        """Take back what a first run has changed of them."""
        self._outside()
        for buffer, before in self._buffers:
            # Kernels of batch norm write to statistics without a new version, and what is as before gets none here.
            buffer.data.copy_(before)
        for held, before_by_name in self._attributes:
            for name in held.keys() - before_by_name.keys() - self._of_torch:
                del held[name]
            held.update(before_by_name)
        for value, content in self._containers:
            value.clear()
            value.extend(content) if isinstance(value, list | deque) else value.update(content)


def restore_random_states(states: Sequence[tuple[torch.device | None, Tensor]]) -> None:
    """Set the generators back."""
    import torch

    for device, state in states:
        torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)


def has_values(x: Tensor) -> bool:
    """Return whether a tensor's values can be looked at."""
    return torch_compat.active_fake_mode() is None and not x.is_meta


def differ(x: Tensor, recorded: Tensor) -> Tensor:
    """Return whether two runs' rows differ: by more than rounding, where an accelerator adds in no fixed order."""
    if x.device.type == "cpu":
        return ((x != recorded) & ~(x.isnan() & recorded.isnan())).any()  # NaN of both is the same
    import torch

    scale = recorded.abs().amax() if recorded.numel() else recorded.new_zeros(())
    return ((x - recorded).abs() > 16 * torch.finfo(x.dtype).eps * scale).any()
