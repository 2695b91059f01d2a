"""Ranks as forked processes: results come back, and so does the one failure that caused the others."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from composer3d.errors import RankError
from composer3d.processes import (
    flush_output,
    fork,
    keep_to_loopback,
    limit_ranks,
    prewarm,
    refuse_open_group,
    refuse_unsafe_fork,
    temporary_folder,
)
from composer3d.registry import Catalogue

__all__ = ["run_ranks"]

# After one rank failed, the others have this long to notice it and leave.
_GRACE_S = 2.0
# A rank that is done keeps its connections open for the others, but not for one that waits for it in vain.
_LINGER_S = 5.0
# What a rank says when another one left it: a consequence, never the cause.
_CONSEQUENCE = re.compile(r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Tt]imeout|socket.*closed")


@dataclass(frozen=True, kw_only=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    timeout_s: float
    backend: str
    init: bool
    folder: Path

    def file(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


@dataclass(frozen=True, kw_only=True)
class _Failure:
    rank: int
    summary: str
    detail: str
    time_s: float
    is_consequence: bool


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 300.0,
    backend: str = "gloo",
    init: bool = True,
    max_ranks: int = 8,
) -> list[Any]:
    """Run `function(*args)` on every rank of a real world, each a forked process with one thread.

    Forking passes functions, closures and arguments on as they are, and costs a tenth of a second where spawning costs
    seconds. The ranks find each other through a file, without ports. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE
    are set as under torchrun; warning filters and the random state are the parent's. At most 8 ranks are alive at once
    over all processes of this user: a call waits for its turn, which `timeout_s` does not include.

    Args:
        function: Runs on each rank; `torch.distributed.get_rank()` says which one it is.
        world_size: Number of ranks, 1 to `max_ranks`.
        args: Passed to `function`.
        timeout_s: Seconds for all ranks together, and of the process group.
        backend: Of the process group.
        init: False leaves making the process group to `function`; only the environment is set.
        max_ranks: That may be alive at once; more than 8 are for a machine of one's own, not for tests.

    Returns:
        What each rank returned, by rank; it travels through torch.save.

    Raises:
        RankError: A rank raised, was killed, left without a result, or did not finish. The text names the rank that
            was first and its traceback, not those that only lost their connection to it.
        ForkError: This process cannot be forked, or `world_size` is above `max_ranks`.

    Memory: each rank shares the parent's pages until it writes to them. Collectives: those of `function`.

    >>> run_ranks(lambda: dist.get_rank() * 10, 2)
    [0, 10]
    """
    __tracebackhide__ = True  # pytest shows the rank's traceback, not this function
    refuse_unsafe_fork()
    refuse_open_group()
    prewarm()
    Catalogue.installed()  # which every rank would read
    with limit_ranks(world_size, limit=max_ranks), temporary_folder("world") as folder:
        job = _Job(
            function=function,
            args=args,
            world_size=world_size,
            timeout_s=timeout_s,
            backend=backend,
            init=init,
            folder=folder,
        )
        report = _run(job)
        if report:
            raise RankError(report)
        return [torch.load(job.file("result", rank), weights_only=False) for rank in range(world_size)]


def _run(job: _Job) -> str:
    """Fork the ranks and wait for them; return the report of their failure, empty if there was none."""
    running: dict[int, int] = {}
    try:
        for rank in range(job.world_size):
            pid = fork()
            if pid == 0:
                _be_rank(job, rank)
            running[pid] = rank
        failures = _wait(job, running)
    finally:
        stacks = _kill(job, running)
    return _report(job, failures, stacks)


def _be_rank(job: _Job, rank: int) -> NoReturn:
    """Do a rank's work in the forked child, leave its result or failure in a file, and leave."""
    status = 1
    try:
        torch.set_num_threads(1)
        stacks = job.file("stacks", rank).open("w")
        faulthandler.enable(file=stacks)  # a rank that aborts in C++ leaves its stack here
        faulthandler.register(signal.SIGUSR1, file=stacks)  # and one that hangs, when the parent asks
        _save(_call(job, rank), job.file("result", rank))
        _linger(job)
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).strip()
        failure = {"summary": summary, "detail": text, "time_s": time.monotonic()}
        job.file("failure", rank).write_text(json.dumps(failure))
    finally:
        # Neither pytest's teardown nor the parent's exit handlers are a rank's business.
        flush_output()
        os._exit(status)


def _call(job: _Job, rank: int) -> Any:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
    os.environ.update({key: str(value) for key, value in environment.items()})
    keep_to_loopback()
    if job.init:
        dist.init_process_group(
            job.backend,
            store=dist.FileStore(str(job.folder / "store"), job.world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
    return job.function(*job.args)


def _save(result: Any, file: Path) -> None:
    try:
        torch.save(result, file)
    except Exception as error:
        error.add_note("this is what the rank returned: return tensors and plain values, or None")
        raise


def _linger(job: _Job) -> None:
    """Wait until every rank is done: one that left would fail those that still connect to it, as a new group does."""
    deadline = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline:
        if all(
            job.file("result", rank).exists() or job.file("failure", rank).exists() for rank in range(job.world_size)
        ):
            return
        time.sleep(0.002)


def _wait(job: _Job, running: dict[int, int]) -> list[_Failure]:
    """Wait until all ranks are done, time is up, or the grace after a failure is over; take the done out of `running`.

    The pids are waited for one by one: other children of this process are not ours to reap.
    """
    failures: list[_Failure] = []
    deadline = time.monotonic() + job.timeout_s
    while running and time.monotonic() < deadline:
        for pid, rank in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            failure = _examine(job, rank, os.waitstatus_to_exitcode(status))
            if failure:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.002)
    return failures


def _examine(job: _Job, rank: int, exit_code: int) -> _Failure | None:
    """Return why a rank that ended did not succeed; None if it did."""
    failure = job.file("failure", rank)
    if exit_code == 1 and failure.exists():
        told = json.loads(failure.read_text())
        return _Failure(rank=rank, is_consequence=bool(_CONSEQUENCE.search(told["summary"])), **told)
    if exit_code == 0 and job.file("result", rank).exists():
        return None
    if exit_code < 0:
        summary = f"killed by {signal.Signals(-exit_code).name}"
    else:
        summary = f"left with exit code {exit_code} before it returned a result"
    detail = _stacks(job, rank)
    return _Failure(rank=rank, summary=summary, detail=detail, time_s=time.monotonic(), is_consequence=False)


def _kill(job: _Job, running: Mapping[int, int]) -> dict[int, str]:
    """Kill the ranks that still run, and return the Python stacks of each by rank."""
    for pid in running:
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 0.5
    while not all(_stacks(job, rank) for rank in running.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {rank: _stacks(job, rank) for rank in running.values()}


def _stacks(job: _Job, rank: int) -> str:
    file = job.file("stacks", rank)
    return file.read_text().rstrip() if file.exists() else ""


def _report(job: _Job, failures: list[_Failure], stacks: Mapping[int, str]) -> str:
    """Write the text of the error: the cause first, then who failed after it, then who never finished."""
    lines: list[str] = []
    ordered = sorted(failures, key=lambda failure: (failure.is_consequence, failure.time_s))
    if ordered:
        first = ordered[0]
        lines += [f"rank {first.rank} of {job.world_size} failed: {first.summary}", first.detail]
        lines += [f"rank {failure.rank} failed after it: {failure.summary}" for failure in ordered[1:]]
        limit = f"{_GRACE_S:g} s after that"
    else:
        limit = f"{job.timeout_s:g} s"
    for rank, stack in sorted(stacks.items()):
        lines += [f"rank {rank} of {job.world_size} did not finish within {limit} and was killed; it was at", stack]
    return "\n".join(line for line in lines if line)
