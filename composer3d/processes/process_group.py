"""The process group and the device, where the loop has not made them."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.processes.arrival import await_all
from composer3d.processes.foreign_peers import refuse_foreign_peers
from composer3d.processes.launchers import device_index, join_launcher
from composer3d.processes.rendezvous import keep_to_loopback, meeting_point

if TYPE_CHECKING:
    import torch

__all__ = ["default_device", "join_world", "own_device", "own_groups", "set_timeouts"]

_JOIN_S = 600.0  # a launcher starts all ranks at once: one that has not come by then is stuck, and torch waits 30 min


@dataclass(kw_only=True, eq=False)
class _OwnWorld:
    """The default process group that compositions of a process share, where one of them made it.

    Attributes:
        group: While it is there.
        num_users: Compositions that have not let go of it.
        num_made: How many have been made, this one included.
        leave_loopback: Gives the environment back that keeps groups, those of later compositions too, to loopback.
        excepthooks: Python's before it was made, and torch's, which writes the rank before an exception's lines. It
            stays once the group is gone, for the exception that ended a composition, and until the next one is made.
    """

    group: Any = None
    num_users: int = 0
    num_made: int = 0
    leave_loopback: Callable[[], None] = lambda: None
    excepthooks: tuple[Any, Any] = (None, None)


@dataclass(kw_only=True, eq=False)
class _LoopsWorld:
    """A default process group that a loop made, and the process groups that compositions made in it.

    Attributes:
        group: The loop's.
        num_users: Compositions that have not let go of it.
        made: Process groups of compositions, which live until the last of these has let go: DTensors of equal meshes
            have each other's.
    """

    group: Any = None
    num_users: int = 0
    made: list[Any] = field(default_factory=list)


@functools.cache
def _loops_world(pid: int) -> _LoopsWorld:
    """Return what is known of the loop's world; a forked process has one of its own."""
    return _LoopsWorld()


@contextmanager
def own_groups() -> Iterator[None]:
    """Note the process groups that are made in a loop's world as those of compositions, which end with the last."""
    import torch.distributed as dist

    world, before = _loops_world(os.getpid()), torch_compat.all_groups()
    try:
        yield
    finally:
        if world.num_users and world.group is dist.group.WORLD:
            world.made += [group for group in torch_compat.all_groups() if group not in before]


@functools.cache
def _own_world(pid: int) -> _OwnWorld:
    """Return what is known of a process's own world; a forked process has one of its own."""
    return _OwnWorld()


def default_device() -> torch.device:
    """Return this process's accelerator if the machine has one, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, device_index(torch.accelerator.device_count()))


def own_device(device: str | torch.device) -> torch.device:
    """Return a device with its number: of several accelerators without one, that of this process.

    Under a launcher it is LOCAL_RANK's; else the one that the loop has made the current one.
    """
    import torch

    stated = torch.device(device)
    index: int | None = stated.index  # torch's annotation leaves out that it may be None
    if stated.type in ("cpu", "meta") or index is not None:
        return stated
    if "LOCAL_RANK" in os.environ:
        return torch.device(stated.type, device_index(torch.accelerator.device_count()))
    return (
        torch.device(stated.type, torch.accelerator.current_device_index())
        if torch.accelerator.is_available()
        else stated
    )


def join_world(device: torch.device, *, timeout_s: float | None = None) -> Callable[[], None]:
    """Initialise the default process group if there is none.

    Under a launcher (see `join_launcher`) it is the launcher's world; otherwise a world of one. A GPU's group
    gets gloo beside NCCL, so that counts and agreements never wait for the GPU. On one machine nothing that it opens
    listens beyond loopback.

    Args:
        device: Where this rank computes.
        timeout_s: How long to wait for the other ranks, and after what time a collective of the group fails; None takes
            ten minutes, and torch's.

    Returns:
        A function that lets go of the group. One that this made is destroyed when all compositions have; of one that
        was there before, the groups that compositions made in it (see `own_groups`).

    Raises:
        RendezvousError: Names the ranks that did not come; or the launcher's variables contradict each other.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    if dist.is_initialized():
        if timeout_s is not None:
            torch_compat.set_group_timeout(None, timedelta(seconds=timeout_s))
        world = _own_world(os.getpid())
        if world.group is not dist.group.WORLD:
            return _join_loops_world()
        world.num_users += 1
        return functools.partial(_let_go, world)
    world = _own_world(os.getpid())
    if sys.excepthook is world.excepthooks[1]:  # else every world would write its rank before that of the one before
        sys.excepthook = world.excepthooks[0]
    before = sys.excepthook
    if world.num_made:
        gc.collect()  # sockets and threads of the last world's groups, which a closed composition's cycles hold
    if device.type == "cpu":
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index or 0)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    leave_loopback = keep_to_loopback()
    if join_launcher() is not None:
        timeout = timedelta(seconds=_JOIN_S if timeout_s is None else timeout_s)
        where = meeting_point(timeout)
        if where:
            await_all(where["store"], place="join", rank=where["rank"], world_size=where["world_size"], timeout=timeout)
        with refuse_foreign_peers():
            dist.init_process_group(backend, timeout=timeout, **where)
        if device.type == "cpu" and timeout_s is None:  # NCCL's own default is _JOIN_S
            torch_compat.set_group_timeout(None, default_pg_timeout)
    else:
        # Documented, but not in the module's __all__.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)

    world.group, world.num_users, world.num_made = dist.group.WORLD, 1, world.num_made + 1
    world.leave_loopback, world.excepthooks = leave_loopback, (before, sys.excepthook)
    return functools.partial(_let_go, world)


def _join_loops_world() -> Callable[[], None]:
    import torch.distributed as dist

    world = _loops_world(os.getpid())
    if dist.get_backend() == "fake":  # whoever imitates ranks ends their world with its groups
        return lambda: None
    if world.group is not dist.group.WORLD:
        gc.collect()  # as for a world of compositions' own, and of these none is left
        world.group, world.num_users, world.made = dist.group.WORLD, 0, []
    world.num_users += 1
    return functools.partial(_let_go_of_groups, world, world.group)


def _let_go_of_groups(world: _LoopsWorld, group: Any) -> None:
    import torch.distributed as dist

    if world.group is not group:  # the loop has ended that world, and made another one
        return
    world.num_users -= 1
    if world.num_users > 0:
        return
    made, world.group, world.made = world.made, None, []
    if made and dist.is_initialized() and group is dist.group.WORLD:
        torch_compat.clear_sharding_caches()  # they hold meshes, and a later one of the same shape has other groups
        there = torch_compat.all_groups()
        for each in made:
            if each in there:
                dist.destroy_process_group(each)


def _let_go(world: _OwnWorld) -> None:
    import torch.distributed as dist

    world.num_users -= 1
    if world.num_users > 0:
        return
    world.leave_loopback()
    is_there, world.group = dist.is_initialized() and world.group is dist.group.WORLD, None
    torch_compat.clear_sharding_caches()  # they hold meshes, and a later one of the same shape has other groups
    if is_there:
        dist.destroy_process_group()


def set_timeouts(groups: Iterable[Any], seconds: float) -> None:
    """Set after what time a collective fails, for the world and for other process groups."""
    timeout = timedelta(seconds=seconds)
    for group in (None, *groups):
        torch_compat.set_group_timeout(group, timeout)
