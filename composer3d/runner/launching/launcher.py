"""The local world: ranks started by torch's elastic agent, watched, restarted after a crash, and stopped together."""

from __future__ import annotations

import io
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from composer3d.errors import ComposerError
from composer3d.processes import machine_error, temporary_folder
from composer3d.runner.launching.lock import RunLock
from composer3d.runner.launching.rank import is_rank, rank_main
from composer3d.runner.launching.signals import interrupt_once
from composer3d.runner.launching.watch import POLL_S, Ended, Outcome, Restart, Watch
from composer3d.runner.reporting.failures import FailureReport, wrong_manifest
from composer3d.runner.reporting.progress import attempt_folder

if TYPE_CHECKING:
    from composer3d.processes import Gate

__all__ = ["LaunchResult", "launch_local", "rank_main", "is_rank", "run_world"]

_QUIET = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """Launch information of a rank.

    Args:
        pid: Of the launcher's process; its death ends the rank.
        private: Its private folder.
        restart: How often it restarted the ranks.
    """

    pid: int
    private: Path
    restart: int


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """Ending of a local world.

    Args:
        outcome: `preempted` is a SIGTERM after which every rank returned; it is a success.
        report: What went wrong, None after a success.
        values: What each rank's function returned, pickled; empty after a failure.
        num_restarts: How often the ranks were started again.
        is_passing: Whether the same command may succeed later: this one of several machines has left the run, was
            taken for lost, or lost the one that served.
    """

    outcome: Outcome
    report: FailureReport | None = None
    values: Mapping[int, Any] = field(default_factory=dict)
    num_restarts: int = 0
    is_passing: bool = False

    @property
    def ok(self) -> bool:
        """Return whether every rank succeeded."""
        return self.report is None

    @property
    def exit_code(self) -> int:
        """Return 0, 2 (manifest or command line are wrong), 3 (the run failed or was interrupted) or 75."""
        if self.is_passing:
            return os.EX_TEMPFAIL
        if self.report is None:
            return 0
        return 2 if wrong_manifest(self.report) else 3


def launch_local(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_ranks: int,
    device: Literal["cpu", "cuda"],
    output: Path,
    max_restarts: int = 0,
    timeout_s: float | None = None,
    grace_s: float = 30.0,
    exclusive: bool = False,
    sizes: Sequence[int] = (),
) -> LaunchResult:
    """Run a function on several ranks of this machine and wait for them.

    The ranks are started by torch's elastic agent, by fork on CPU, by spawn on CUDA, and meet in a folder that only
    this user can read: nothing listens but their backends, on loopback. When this process dies, the kernel kills them.
    When one fails, the others get a second to notice and report it, then SIGTERM and SIGKILL; one that is
    saving gets up to `grace_s`. SIGTERM to this process reaches the ranks as SIGTERM, and they have `grace_s` to save
    and return. Ctrl-C ends them; a second one kills them.

    Args:
        function: What each rank runs; on CUDA importable by name.
        args: Its arguments; on CUDA they are pickled.
        num_ranks: Ranks to start.
        device: Where the ranks compute.
        output: The run's output folder; `error.json` goes there after a failure.
        max_restarts: How often all ranks are started again after a crash; never after a user's mistake.
        timeout_s: Seconds after which ranks still running are a failure; None is no limit.
        grace_s: Seconds the ranks have after a SIGTERM, and their processes to exit once all have returned.
        exclusive: Hold the output folder's lock, over all restarts.
        sizes: World sizes that a restart may have: it takes the next smaller one, where there is one.

    Returns:
        How it ended; nothing is printed, the report is in the result.

    Raises:
        ForkError: This process has run tensor operators, so forked ranks would hang.
        LockError: Another run holds the output folder.
        ValueError: This is not the main thread, which alone may take signals.

    Memory: a forked rank shares what is imported. Collectives: none of its own.
    """
    from composer3d.processes import prewarm, refuse_unsafe_fork

    forked = device == "cpu"
    if forked:
        prewarm()
        refuse_unsafe_fork()
    with ExitStack() as stack:
        private = stack.enter_context(temporary_folder("launch"))
        lock = stack.enter_context(RunLock(output, attempts=private)) if exclusive else None
        limits: dict[str, Any] = {"max_restarts": max_restarts, "timeout_s": timeout_s, "grace_s": grace_s}
        watch = Watch(private=private, num_ranks=num_ranks, sizes=sizes, **limits)
        return _launch(watch, "fork" if forked else "spawn", (function, tuple(args), output), lock)


def _launch(
    watch: Watch,
    start_method: Literal["fork", "spawn"],
    args: tuple[Callable[..., Any], tuple[Any, ...], Path],
    lock: RunLock | None,
) -> LaunchResult:
    """Run the ranks to their end, and return how it was."""
    output = args[2]
    output.mkdir(parents=True, exist_ok=True)
    (output / "error.json").unlink(missing_ok=True)
    result = run_world(watch, start_method, args, lock)
    if result.report is not None:
        result.report.write_error_json(output)
    return result


def run_world(
    watch: Watch,
    start_method: Literal["fork", "spawn"],
    args: tuple[Callable[..., Any], tuple[Any, ...], Path],
    lock: RunLock | None,
) -> LaunchResult:
    """Run the ranks of one world to their end, and return how it was; nothing is written into the run's folder.

    Args:
        watch: Over the ranks.
        start_method: Of the ranks.
        args: The function that each rank runs, its arguments, and the run's folder.
        lock: On that folder.
    """
    try:
        with _quiet(), watch.taking_signals():
            ended = _run(watch, start_method, args, lock)
        values = {} if ended.report else _values(watch)
    except Exception as error:
        if isinstance(error, ComposerError) or machine_error(error, args[2]) is not None:
            raise  # told without a traceback
        report = FailureReport.of_launcher(error, world_size=watch.num_ranks)
        return LaunchResult(outcome="failed", report=report, num_restarts=watch.num_restarts)
    return LaunchResult(outcome=ended.outcome, report=ended.report, values=values, num_restarts=watch.num_restarts)


def _run(watch: Watch, start_method: Literal["fork", "spawn"], args: tuple[Any, ...], lock: RunLock | None) -> Ended:
    """Start the ranks as often as the watch wants it; return how they ended."""
    from torch.distributed.elastic.multiprocessing import SignalException

    while True:
        try:
            try:
                _run_agent(watch, start_method, args, lock)
            except SignalException as caught:
                # The agent's own handler had the signal: the ranks were just being started, and it has ended them.
                watch.stopped_while_starting(caught.sigval)
        except Restart:
            continue
        except Ended as ended:
            return ended.with_traceback(None)  # whose frames hold the agent and its store


def _run_agent(
    watch: Watch, start_method: Literal["fork", "spawn"], args: tuple[Any, ...], lock: RunLock | None
) -> None:
    """Start the ranks and stay until the watch leaves the agent's loop.

    The agent restarts nothing itself: every attempt has a folder, and a store, of its own.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from composer3d.processes import Gate, scanning_new_objects_only
    from composer3d.torch_compat import local_agent, lone_rendezvous

    watch.folder.mkdir()
    gate = Gate()
    spec = WorkerSpec(
        role="composer3d",
        local_world_size=watch.num_ranks,
        rdzv_handler=lone_rendezvous(watch.run_id),
        entrypoint=_local_rank,
        args=(
            *args,
            _Launcher(pid=os.getpid(), private=watch.private, restart=watch.num_restarts),
            max(1, len(os.sched_getaffinity(0)) // watch.num_ranks),
            gate if start_method == "fork" else None,  # a spawned rank has no locks of its parent's threads
            lock,
        ),
        max_restarts=0,
        monitor_interval=POLL_S,
    )

    def started(pids: dict[int, int]) -> None:
        watch.started(pids)
        gate.open(len(pids))

    agent = local_agent(spec, start_method, started=started, look=watch.look, failed=watch.failed)
    # What an earlier world left is collected here, and what is alive never in a forked rank: to destroy a store's
    # server there, whose thread the fork has not copied, is a segmentation fault.
    with scanning_new_objects_only():
        try:
            agent.run()
        finally:
            gate.close()


def _values(watch: Watch) -> dict[int, Any]:
    """Return the results of the ranks' functions, of ranks that returned one."""
    files = {rank: watch.folder / f"rank-{rank}.value" for rank in range(watch.num_ranks)}
    return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}


def _local_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    output: Path,
    launcher: _Launcher,
    num_threads: int,
    gate: Gate | None,
    lock: RunLock | None,
) -> NoReturn:
    """Run a rank of the local world: threads first, since the first operator fixes their number."""
    from composer3d.processes import die_with

    die_with(launcher.pid)  # torch asked for SIGINT, which a rank may catch
    import torch

    from composer3d.processes import INTERFACES, LAUNCH, keep_to_loopback

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent receives it too, and requests a save
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    interrupt_once()
    if gate is not None:
        gate.wait()
    if lock is not None:
        lock.leave_children_out()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(launcher.restart)
    os.environ[LAUNCH] = str(launcher.private)
    for name in ("MASTER_ADDR", "MASTER_PORT", *INTERFACES):
        os.environ.pop(name, None)  # nobody serves a store, and an interface of a cluster's is not wanted here
    keep_to_loopback()
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        torch.set_num_threads(num_threads)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines, at once: ranks share the stream, and `python -u` would cut lines in two.
            stream.reconfigure(line_buffering=True, write_through=False)
    rank_main(_keep_value, function, args, output, output=output, report=False)
    # Not a return: the agent would hold the process until all have returned, and hang if one dies while it waits.
    # Its recorder swallows the exit code 0, but not None, which is the same to the system.
    raise SystemExit(None)


def _keep_value(function: Callable[..., Any], args: tuple[Any, ...], output: Path) -> None:
    """Run the function and leave its result for the parent."""
    value = function(*args)
    (attempt_folder(output) / f"rank-{os.environ['RANK']}.value").write_bytes(pickle.dumps(value))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the elastic agent's own log lines and warnings from the user: the report says it all, once."""
    loggers = [logging.getLogger(name) for name in _QUIET]
    before = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silence)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork with threads; refuse_unsafe_fork knows which of them matter.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silence)
