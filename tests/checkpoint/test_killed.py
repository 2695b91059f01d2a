"""Whatever moment a save is killed at, a complete checkpoint is there afterwards, and the next save goes on."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composer3d.checkpoint import AsyncSaver, latest, load, prune, read_state, read_tensor, save
from composer3d.processes.forking import fork, limit_ranks, prewarm, refuse_unsafe_fork

# Everything by which a save changes the disk.
OPERATIONS = ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink")


def version_of(path: Path) -> int:
    """Return the version that a checkpoint holds, after checking that it is one version throughout."""
    version = read_state(path)["version"]
    tensors = {"w": torch.zeros(5, 3), "b": torch.zeros(4)}
    load(path, tensors=tensors)
    assert all(torch.equal(tensor, torch.full_like(tensor, version)) for tensor in tensors.values())
    return version


def write(path: Path, version: int) -> None:
    tensors = {"w": torch.full((5, 3), float(version)), "b": torch.full((4,), float(version))}
    save(path, tensors=tensors, state={"version": version})


def die_at(count: int, path: Path, version: int) -> bool:
    """Save in a child that kills itself at its `count`-th operation on the disk; tell whether it got that far."""
    pid = fork()
    if pid == 0:
        left = count

        def counted(function):
            def call(*args, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **options)

            return call

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        write(path, version)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    assert exit_code in (0, -signal.SIGKILL)
    return exit_code != 0


@pytest.mark.parametrize(("name", "before"), [("step-1", 1), ("step-2", 1), ("step-2", 2)])
def test_killed_at_every_operation(tmp_path, name, before):
    refuse_unsafe_fork()
    count = 0
    while True:
        folder = tmp_path / str(count)
        for version in range(1, before + 1):
            write(folder / f"step-{version}", version)
        killed = die_at(count, folder / name, 9)
        assert version_of(latest(folder)) in ((before, 9) if killed else (9,))
        write(folder / "step-3", 10)
        assert version_of(latest(folder)) == 10
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            {"latest", "step-1", "step-3"} | {path.name for path in folder.glob("step-2")}
        )
        if not killed:
            break
        count += 1
    assert count >= 10


def save_for_ever(rank: int, folder: Path, store: Path, pipe: int, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    mesh = init_device_mesh("cpu", (2,))
    found = latest(folder)
    version = read_state(found)["version"] if found else 0
    saver = AsyncSaver()
    dist.barrier()
    while True:
        version += 1
        weight = distribute_tensor(torch.full((5, 3), float(version)), mesh, [Shard(0)])
        tensors = {"w": weight, "b": torch.full((4,), float(version))}
        if rank == 0:
            os.write(pipe, b"b" + version.to_bytes(4))
        # Every third version replaces a checkpoint that is there.
        path = folder / f"step-{version - version % 3}"
        if asynchronous:
            saver.save(path, tensors=tensors, state={"version": version})
            saver.wait()
        else:
            save(path, tensors=tensors, state={"version": version})
        if rank == 0:
            os.write(pipe, b"e" + version.to_bytes(4))
            prune(folder, 2)
        dist.barrier()


def killed_run(folder: Path, store: Path, num_saves: int, share: float, asynchronous: bool) -> tuple[int, int]:
    """Kill two saving ranks some way into a save; return the last version that was finished and the last begun.

    Args:
        num_saves: How many saves are let through.
        share: When to strike at the next, as a share of the time that one of them took.
    """
    reading, writing = os.pipe()
    pids = []
    for rank in range(2):
        pid = fork()
        if pid == 0:
            try:
                save_for_ever(rank, folder, store, writing, asynchronous)
            finally:
                os._exit(1)
        pids.append(pid)
    os.close(writing)
    told, times = b"", []
    for _ in range(2 * num_saves + 1):
        told += os.read(reading, 5)
        times.append(time.perf_counter())
    select.select([], [], [], share * (times[1] - times[0]))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [-signal.SIGKILL] * 2
    while more := os.read(reading, 4096):
        told += more
    os.close(reading)
    events = [(told[at : at + 1], int.from_bytes(told[at + 1 : at + 5])) for at in range(0, len(told), 5)]
    finished, begun = (max(version for kind, version in events if kind == wanted) for wanted in (b"e", b"b"))
    return finished, begun


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_ten_random_moments(tmp_path, asynchronous):
    refuse_unsafe_fork()
    prewarm()
    moments = random.Random(7)
    folder = tmp_path / "checkpoints"
    write(folder / "step-0", 0)
    before, interrupted = 0, 0
    with limit_ranks(2):
        for attempt in range(10):
            num_saves, share = moments.randint(1, 3), moments.uniform(0.0, 1.2)
            store = tmp_path / f"store-{attempt}"
            finished, begun = killed_run(folder, store, num_saves, share, asynchronous)
            found = version_of(latest(folder))
            assert before < finished <= found <= begun
            before, interrupted = found, interrupted + (begun > finished)
    assert interrupted >= 3


def leave_one_rank(folder: Path, store: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    if rank == 1:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(folder / "step-1", tensors={f"w{rank}": torch.ones(2)}, state={"version": 2})
    except RuntimeError:
        os._exit(7)


def test_one_killed_rank_does_not_leave_the_other_waiting(tmp_path):
    refuse_unsafe_fork()
    prewarm()
    write(tmp_path / "step-1", 1)
    pids = []
    with limit_ranks(2):
        for rank in range(2):
            pid = fork()
            if pid == 0:
                try:
                    leave_one_rank(tmp_path, tmp_path / "store", rank)
                finally:
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [7, -signal.SIGKILL]
    assert latest(tmp_path) == tmp_path / "step-1"
    assert version_of(tmp_path / "step-1") == 1
    assert read_tensor(tmp_path / "step-1", "b").tolist() == [1, 1, 1, 1]
