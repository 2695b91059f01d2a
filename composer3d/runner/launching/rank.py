"""Entry point of a rank: its function, its marker or its failure, and under torchrun the one report of the run."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from composer3d.manifest import redacted
from composer3d.observation import aborting
from composer3d.processes import find_launch, user_folder
from composer3d.runner.reporting.failures import Ending, FailureReport, read_failures, root_cause
from composer3d.runner.reporting.progress import (
    NOTICE,
    LastSeen,
    Progress,
    attempt_before,
    attempt_folder,
    leave_notice,
)

__all__ = ["is_rank", "rank_main"]

_WAIT_FOR_CAUSE_S = 2.0


def is_rank() -> bool:
    """Return whether torchrun, or another launcher, started this process as a rank.

    Raises:
        RendezvousError: The launcher's variables contradict each other.
    """
    return find_launch(os.environ) is not None


def rank_main(function: Callable[..., Any], *args: Any, output: Path, report: bool = True) -> Any:
    """Run a function as this rank, and leave behind how it ended.

    When the function returns, it writes a marker: a process that ended without one left early, which torchrun takes
    for success. When it raises, the failure is written to the attempt's folder and to torchrun's error file, and
    the process exits with 2 (a wrong manifest) or 3. With `report`, one rank of the run also writes the report to
    standard error and to `error.json`: the one that failed first, or one that lost it, if it cannot speak any more.

    Args:
        function: What to run.
        args: Positional arguments of `function`.
        output: The run's output folder, the same for all ranks.
        report: False where a parent reports for all ranks.

    Returns:
        What the function returned.

    Raises:
        SystemExit: The function failed.

    Memory: one page. Collectives: none.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _refuse_restart(output)
    folder = attempt_folder(output)
    for stale in ("json", "finished", NOTICE):  # of a world before under the same name, where torchrun did not count it
        (folder / f"rank-{rank}.{stale}").unlink(missing_ok=True)
    progress = None
    with ExitStack() as files:
        try:
            progress = files.enter_context(Progress(output, rank))
            stack = files.enter_context((folder / f"rank-{rank}.stack").open("w"))
            # torch ends a rank by abort where collectives do not fit: it leaves its place here.
            faulthandler.enable(stack)
            files.enter_context(aborting(partial(leave_notice, folder, rank)))
            files.callback(faulthandler.disable)
            value = function(*args)
            (folder / f"rank-{rank}.finished").touch()
        except KeyboardInterrupt:
            raise SystemExit(3) from None
        except BaseException as error:
            failure = FailureReport.from_exception(
                error, rank=rank, world_size=world_size, folder=folder, output=output
            )
            _fail(failure, error, progress=progress, output=output, report=report)
    _leave_group()
    if report and rank == 0 and not (folder / "reported").exists():
        (output / "error.json").unlink(missing_ok=True)
    return value


def _fail(
    failure: FailureReport, error: BaseException, *, progress: Progress | None, output: Path, report: bool
) -> NoReturn:
    """Report the failure and exit."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if threading.current_thread() is threading.main_thread():
        # torchrun ends the others as soon as one is gone; who reports must live until it has.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = attempt_folder(output)
    # torchrun names the earliest error file as the root cause: this rank's, before the others can read why, or theirs.
    if not failure.consequence:
        _record(get_error_handler().record_exception, error)
    try:
        failure.write(folder)
    except OSError:  # of a full disk, or without a file descriptor left
        if progress is not None:
            progress.leave(failure.to_text())
    if report:
        if failure.consequence:
            _await_cause(folder, failure.world_size)
        _report_once(failure, folder, output)
    if failure.consequence:
        _record(get_error_handler().record_exception, error)
    raise SystemExit(failure.exit_code) from None


def _record(record: Callable[[BaseException], None], error: BaseException) -> None:
    """Leave an error, without secrets, for the elastic agent, which prints it under torchrun.

    What stands in the way of that is what the report is about.
    """
    with suppress(OSError):
        record(error)
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is not None and os.path.isfile(file):
            told = json.loads(Path(file).read_text(), object_hook=_redacted)
            Path(file).write_text(json.dumps(told))


def _redacted(texts: dict[str, Any]) -> dict[str, Any]:
    return {key: redacted(text) if isinstance(text, str) else text for key, text in texts.items()}


def _await_cause(folder: Path, world_size: int) -> None:
    """Wait until a rank with a failure of its own has reported it, or has ended without a report."""
    deadline = time.monotonic() + _WAIT_FOR_CAUSE_S
    while time.monotonic() < deadline:
        if any(not failure.consequence for failure in read_failures(folder, world_size).values()):
            return
        if _silently_ended(folder, world_size):
            return
        time.sleep(0.05)


def _report_once(failure: FailureReport, folder: Path, output: Path) -> None:
    """Write the report, if no other rank has."""
    try:
        if not _is_first_to_report(folder):
            return
        cause = root_cause(folder, _silently_ended(folder, failure.world_size), world_size=failure.world_size)
    except OSError:
        cause = None
    cause = cause or failure
    cause.write_error_json(output)
    if sys.stderr is not None:
        sys.stderr.write(cause.render(output))
        sys.stderr.flush()


def _is_first_to_report(folder: Path) -> bool:
    """Claim the report for this rank; on a disk that takes no file, among the ranks of this machine."""
    try:
        os.close(os.open(folder / "reported", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        marker = user_folder("composer3d") / f"reported-{folder.name}"
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
    return True


def _silently_ended(folder: Path, world_size: int) -> list[Ending]:
    """Return this host's ranks that ended and left neither a report nor the marker."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    told = read_failures(folder, world_size)
    endings = []
    for rank in range(first, first + local):
        seen = LastSeen.read(folder, rank)
        if rank in told or seen is None or (folder / f"rank-{rank}.finished").exists():
            continue
        if not _alive(seen.pid):
            endings.append(Ending(rank=rank, exit_code=None, time_ns=time.time_ns()))
    return endings


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _refuse_restart(output: Path) -> None:
    """End at once if the attempt before failed by a mistake of the user's: another attempt would fail alike."""
    folder = attempt_before(output)
    if folder is None:
        return
    before = read_failures(folder, len(list(folder.glob("rank-*.progress"))))  # its world may have been a larger one
    final = [failure for failure in before.values() if failure.kind in ("user", "machine") and not failure.consequence]
    codes = [failure.exit_code for failure in final]
    if codes:
        raise SystemExit(codes[0])


def _leave_group() -> None:
    """Destroy a process group that the function left behind: who still waits for this rank then hears of it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
