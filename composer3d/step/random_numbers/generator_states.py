"""torch's default generators of a run: that of the CPU, and that of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Generators"]


@dataclass(frozen=True, kw_only=True)
class Generators:
    """The default generators that a model on a device draws from.

    Args:
        device: Where parameters live.
    """

    device: torch.device

    def states(self) -> list[Tensor]:
        """Return their states."""
        import torch

        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state(self.device))
        return states

    def restore(self, states: list[Tensor]) -> None:
        """Set their states."""
        import torch

        torch.set_rng_state(states[0])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states[1], self.device)

    def seed(self, seed: int) -> None:
        """Seed them."""
        import torch

        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)
