import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer3d.processes.forking import die_with, limit_ranks
from composer3d.runner.launching.launcher import launch_local

CASES = Path(__file__).with_name("launch_cases.py")
LIMIT_S = 180
WHO = r"\([^ ]+, pid \d+\)"


LOCAL = (
    "reduce",
    "raise",
    "kill",
    "os_exit",
    "return",
    "sys_exit",
    "user:2",
    "manifest:2",
    "crash_once:1",
    "unreadable",
    "skip",
    "mismatch",
)
# What waits for a timeout, in a process beside the others'.
WAITING = ("stubborn", "slow_report", "stuck:0:5", "linger:0:30:1")


@dataclass
class Told:
    """What one case wrote."""

    output: Path
    out: list[str]
    err: str


def command(output, *cases):
    return [sys.executable, "-W", "error", str(CASES), str(output), *cases]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def sections(text):
    parts = re.split(r"^== (\w+)\n", text, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """All cases from two processes: a world that failed leaves nothing behind that disturbs the next."""
    output = tmp_path_factory.mktemp("launch")
    newest = output / "raise" / "checkpoints" / "step-10"
    newest.mkdir(parents=True)
    for name in (".metadata", "state.json"):
        (newest / name).touch()
    out, err = {}, {}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(command(output, *cases), env=environment(), stdout=-1, stderr=-1, text=True)
            )
            for cases in (WAITING, LOCAL)
        ]
        for process in reversed(started):
            own_out, own_err = process.communicate(timeout=1200)
            assert process.returncode == 0, own_err
            out |= sections(own_out)
            err |= sections(own_err)
    return {name: Told(output / name, sorted(out[name].splitlines()), err[name]) for name in out}


def matches(pattern, text):
    assert re.fullmatch(pattern, text, re.DOTALL), text


def where(output, checkpoint="no checkpoint was complete"):
    return re.escape(f"details: {output}/error.json; {checkpoint}\n")


def error_json(output):
    return json.loads((output / "error.json").read_text())


def test_ranks_compute_together_and_nothing_else_is_said(told):
    case = told["reduce"]
    assert (case.out, case.err) == (["finished 0", "sum 2", "sum 2"], "")
    assert list(case.output.iterdir()) == []


def test_a_rank_that_raises_is_named_with_its_step_and_traceback(told):
    case = told["raise"]
    assert case.out == ["failed 3"]
    newest = case.output / "checkpoints" / "step-10"
    matches(
        rf"run failed: rank 1 of 2 {WHO} raised ValueError at step 12: the batch is bad\n"
        r"Traceback \(most recent call last\):\n"
        r'  File "[^"]*launch_cases.py", line \d+, in case_raise\n[^\n]*\n'
        r"ValueError: the batch is bad\n"
        r"also ended: rank 0 \(connection lost\)\n" + where(case.output, f"the newest complete checkpoint is {newest}"),
        case.err,
    )
    error = error_json(case.output)
    assert {key: error[key] for key in ("composer3d", "rank", "kind", "message", "step")} == {
        "composer3d": 1,
        "rank": 1,
        "kind": "crash",
        "message": "the batch is bad",
        "step": 12,
    }
    assert "in case_raise" in error["traceback"]
    assert [(other["rank"], other["consequence"]) for other in error["others"]] == [(0, True)]


@pytest.mark.parametrize(
    ("name", "said", "kind"),
    [
        ("kill", "was killed by SIGKILL at step 12", "killed"),
        ("os_exit", "left early with exit code 0 at step 3", "left"),
        ("return", "returned before the others at step 3", "left"),
    ],
)
def test_a_rank_that_is_gone_is_the_cause_and_not_the_rank_that_lost_it(told, name, said, kind):
    case = told[name]
    assert case.out == ["failed 3"]
    matches(
        rf"run failed: rank 1 of 2 {WHO} {said}\nalso ended: rank 0 \(connection lost\)\n" + where(case.output),
        case.err,
    )
    assert (error_json(case.output)["rank"], error_json(case.output)["kind"]) == (1, kind)


def test_a_skipped_step_ends_the_run(told):
    case = told["skip"]
    assert case.out == ["failed 3"]
    matches(
        r"run failed: ranks do not run the same step: rank 1 \(dp_shard 1\) is at step 2, while 1 of 2 ranks are at "
        r"step 1; a rank skipped or repeated a batch\n(likewise: rank [01]\n)?" + where(case.output),
        case.err,
    )


def test_tensors_that_do_not_fit_are_told_with_what_every_rank_ran(told):
    case = told["mismatch"]
    assert case.out == ["failed 3"]
    _, report = case.err.split("run failed: ")
    matches(
        rf"rank 0 of 2 {WHO} was killed by SIGABRT in mismatched \(launch_cases.py:\d+\) at step 1\n"
        r"a collective failed in step 1: a rank was sent another number of bytes than its collective expects\n"
        r"collective \d+ over dp_shard \(ranks 0 and 1; launch_cases.py:\d+ in mismatched\): "
        r"rank 1 \(dp_shard 1\) ran all_reduce of \[5000\], while rank 0 ran all_reduce of \[5\]\n"
        r"rank 1 \(dp_shard 1\): in step 1, at launch_cases.py:\d+ in mismatched, "
        r"last collective all_reduce of \[5000\] over dp_shard \(launch_cases.py:\d+ in mismatched\)\n"
        r"rank 0 \(dp_shard 0\): in step 1, at launch_cases.py:\d+ in mismatched, "
        r"last collective all_reduce of \[5\] over dp_shard \(launch_cases.py:\d+ in mismatched\)\n"
        r"also ended: rank 1 \(connection lost\)\n" + where(case.output),
        report,
    )


def test_leaving_by_sys_exit_shows_where(told):
    case = told["sys_exit"]
    assert case.out == ["failed 3"]
    matches(
        rf"run failed: rank 1 of 2 {WHO} left early with exit code 0 at step 3\nTraceback .* in case_sys_exit\n"
        r"    sys.exit\(0\)\nSystemExit: 0\nalso ended: rank 0 \(connection lost\)\n" + where(case.output),
        case.err,
    )


def test_a_users_mistake_is_one_message_and_is_not_tried_again(told):
    case = told["user"]
    assert case.out == ["attempt 0", "attempt 0", "failed 3"]
    matches(
        r"run failed: corpus/: there is no text here; name a file or a folder of text\n" + where(case.output), case.err
    )


def test_a_wrong_manifest_is_exit_code_2_and_its_problems_alone(told):
    assert (told["manifest"].out, told["manifest"].err) == (["failed 2"], "run.toml:3:1: [train] the table is empty\n")


def test_a_crash_is_restarted(told):
    case = told["crash_once"]
    assert case.out == ["finished 0", "sum 2 after 1", "sum 2 after 1"]
    matches(r"run failed: rank 1 of 2 .*only once.*\nrestarting all ranks \(1 of 1\)\n", case.err)
    assert list(case.output.iterdir()) == []


def test_an_exception_of_the_launchers_own_is_reported_with_its_traceback(told):
    case = told["unreadable"]
    assert case.out == ["failed 3"]
    matches(
        r"run failed: the launcher raised LookupError: no such state\nTraceback \(most recent call last\):\n.*"
        r"in __setstate__\n.*LookupError: no such state\n" + where(case.output),
        case.err,
    )
    error = error_json(case.output)
    assert (error["rank"], error["kind"]) == (None, "crash") and "in __setstate__" in error["traceback"]


def test_a_rank_that_ignores_sigterm_is_killed_after_another_failed(told):
    case = told["stubborn"]
    assert case.out == ["failed 3"]
    matches(
        rf"run failed: rank 1 of 2 {WHO} raised ValueError at step 0: only rank 1\nTraceback .*\n" + where(case.output),
        case.err,
    )


def test_a_rank_that_is_slow_to_report_whom_it_lost_is_waited_for(told):
    case = told["slow_report"]
    matches(
        rf"run failed: rank 1 of 2 {WHO} was killed by SIGKILL at step 0\nalso ended: rank 0 \(connection lost\)\n"
        + where(case.output),
        case.err,
    )


def test_ranks_that_do_not_end_are_a_failure_that_says_where_they_are(told):
    case = told["stuck"]
    assert case.out == ["failed 3"]
    matches(
        r"run failed: 2 of 2 ranks did not end within 5 s \(rank 0 at step 2, rank 1 at step 2\)\n"
        + where(case.output),
        case.err,
    )


def test_ranks_share_the_cores_unless_the_user_says_otherwise(tmp_path):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    theirs = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command(tmp_path, "threads"), env=theirs, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[1:] == [f"{threads} {threads}", f"{threads} {threads}", "finished 0"]


def times_of_fork_and_entry():
    """Return when this process was forked, and the time now, in seconds since the machine started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)


def test_no_rank_starts_before_the_last_one_is_forked(tmp_path):
    with limit_ranks(4):
        result = launch_local(times_of_fork_and_entry, num_ranks=4, device="cpu", output=tmp_path)
    forked, entered = zip(*result.values.values(), strict=True)
    assert len(forked) == 4
    assert max(forked) < min(entered)


def test_a_rank_that_has_returned_but_does_not_exit_is_killed_and_the_run_is_good(told):
    case = told["linger"]
    assert case.out == ["finished 0", "values {0: 2.0, 1: 2.0}"]
    assert case.err == "ranks [1] had to be killed: they had finished, but did not exit\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_ranks_agree_save_and_return_after_a_signal_to_their_parent(tmp_path, number):
    out, err = signalled("preempt", tmp_path, number)
    assert (out[-1], err) == ("preempted 0", "")
    saved = [(tmp_path / "preempt" / f"saved-{rank}").read_text() for rank in range(2)]
    assert saved[0] == saved[1]


def test_ctrl_c_lets_ranks_clean_up_and_is_exit_code_3(tmp_path):
    out, err = signalled("interrupt", tmp_path, signal.SIGINT)
    assert [line for line in out if line != "running"] == ["closed", "closed", "interrupted 3"]
    matches(r"interrupted\n" + where(tmp_path / "interrupt"), err)


def signalled(case, output, number):
    """Send a signal to the parent once its ranks run; return the lines and the error output."""
    with subprocess.Popen(command(output, case), env=environment(), stdout=-1, stderr=-1, text=True) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == [f"== {case}\n", "running\n"]
        parent.send_signal(number)
        out, err = parent.communicate(timeout=LIMIT_S)
    return out.splitlines(), err.removeprefix(f"== {case}\n")


def await_end(pids):
    """Wait until processes are gone, or only wait for somebody to reap them."""
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_that_catch_everything_end_with_their_launcher(tmp_path):
    with subprocess.Popen(command(tmp_path, "deaf"), env=environment(), stdout=-1, text=True) as parent:
        assert parent.stdout.readline() == "== deaf\n"
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        os.kill(ranks[0], signal.SIGSTOP)
        assert all(is_running(rank) for rank in ranks)
        parent.kill()
        await_end(ranks)


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    pid = os.fork()
    if pid == 0:
        die_with(os.getppid() + 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def torchrun(case, output, *options):
    return subprocess.run(
        torchrun_command(case, output, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def torchrun_command(case, output, *options):
    arguments = ["--standalone", "--nproc-per-node", "2", *options, str(CASES), str(output), case]
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def test_under_torchrun_the_failed_rank_reports_once_before_torchrun_does(tmp_path):
    done = torchrun("raise", tmp_path)
    assert done.returncode == 1
    report, _, block = done.stderr.partition(f"details: {tmp_path}/error.json")
    assert re.search(rf"run failed: rank 1 of 2 {WHO} raised ValueError at step 12: the batch is bad\n", report)
    assert "FAILED" not in report and "run failed" not in block
    assert "Root Cause" in block and "ValueError: the batch is bad" in block.partition("Root Cause")[2]
    assert error_json(tmp_path)["rank"] == 1


def test_under_torchrun_an_early_leaver_is_named_by_the_rank_that_lost_it(tmp_path):
    done = torchrun("os_exit", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("run failed: ") == 1
    said = r"ended without a word \(it was killed, or left by os._exit\) at step 3"
    assert re.search(rf"run failed: rank 1 of 2 {WHO} {said}\n", done.stderr)
    assert error_json(tmp_path)["rank"] == 1


def test_under_torchrun_a_users_mistake_is_not_tried_again(tmp_path):
    done = torchrun("user", tmp_path, "--max-restarts", "1")
    # One of the two may be ended before it gets as far.
    assert set(done.stdout.splitlines()) == {"attempt 0"}
    assert done.stderr.count("run failed: corpus/: there is no text here") == 1
