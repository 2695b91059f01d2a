"""The process group and the device, where the loop has not made them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    import torch

__all__ = ["World", "default_device", "join_world"]


def default_device() -> torch.device:
    """Return this process's accelerator if the machine has one, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


class World:
    """The process groups that a composition made, as opposed to those that were there or that the loop makes later."""

    def __init__(self, *, is_own: bool) -> None:
        self._is_own = is_own
        self._before = torch_compat.process_groups()
        self._made: list[Any] | None = None

    def settle(self) -> None:
        """Take the groups made so far for the composition's own."""
        self._made = [group for group in torch_compat.process_groups() if group not in self._before]

    def release(self) -> None:
        """Destroy them: with the default group all, else those of the mesh. Collectives: none."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        if self._is_own:
            dist.destroy_process_group()
            return
        if self._made is None:
            self.settle()
        alive = torch_compat.process_groups()
        for group in self._made or ():
            if group in alive:
                dist.destroy_process_group(group)


def join_world(device: torch.device) -> World:
    """Initialise the default process group if there is none.

    Under torchrun, or any launcher that sets RANK and WORLD_SIZE, it is theirs; otherwise a world of one. A GPU's group
    gets gloo beside NCCL, so that counts and agreements never wait for the GPU.

    Returns:
        What will destroy the groups that are made from here on.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return World(is_own=False)
    if device.type == "cpu":
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index or 0)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        dist.init_process_group(backend)
    else:
        # Documented, but not in the module's __all__.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return World(is_own=True)
