import json
import os
import signal
import timeit
from dataclasses import replace

import pytest

from composer3d.errors import CheckpointError, DataError, ManifestError, Problem, StepError
from composer3d.runner.launching.rank import is_rank, rank_main
from composer3d.runner.launching.signals import Preemption
from composer3d.runner.reporting.failures import Ending, FailureReport, read_failures, root_cause, wrong_manifest
from composer3d.runner.reporting.progress import LastSeen, Progress, RunPhase, attempt_folder


def lost():
    return RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")


def caught(error):
    try:
        raise error
    except BaseException as raised:
        return raised


def during(first, then):
    try:
        try:
            raise first
        finally:
            raise then
    except Exception as raised:
        return raised


def failure(folder, error, rank, world_size=2, time_ns=None):
    report = FailureReport.from_exception(caught(error), rank=rank, world_size=world_size, folder=folder)
    report = report if time_ns is None else replace(report, time_ns=time_ns)
    report.write(folder)
    return report


def block(report):
    return report.render().replace(f"({report.host}, pid {report.pid})", "(HOST)")


def test_what_is_written_is_read_back_whole(tmp_path):
    written = failure(tmp_path, ValueError("bad"), 1)
    assert read_failures(tmp_path, 2) == {1: written}
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


def test_the_earliest_own_failure_is_the_cause(tmp_path):
    failure(tmp_path, lost(), 0, world_size=3, time_ns=1)
    failure(tmp_path, ValueError("second"), 1, world_size=3, time_ns=3)
    failure(tmp_path, ValueError("first"), 2, world_size=3, time_ns=2)
    report = root_cause(tmp_path, (), world_size=3)
    assert (report.rank, report.message) == (2, "first")
    assert block(report).splitlines()[0] == "run failed: rank 2 of 3 (HOST) raised ValueError: first"
    assert block(report).splitlines()[-1] == "also ended: rank 0 (connection lost), rank 1 (ValueError: second)"


def test_nothing_failed(tmp_path):
    assert root_cause(tmp_path, (), world_size=2) is None


def test_all_ranks_lost_a_connection_then_the_earliest_is_named(tmp_path):
    failure(tmp_path, lost(), 0, time_ns=2)
    failure(tmp_path, lost(), 1, time_ns=1)
    report = root_cause(tmp_path, (), world_size=2)
    assert (report.rank, block(report).splitlines()[-1]) == (1, "likewise: rank 0")


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (-signal.SIGKILL, "was killed by SIGKILL", "killed"),
        (-signal.SIGRTMIN - 1, f"was killed by signal {signal.SIGRTMIN + 1}", "killed"),
        (0, "left early with exit code 0", "left"),
        (7, "ended with exit code 7 and no exception", "left"),
        (None, "ended without a word (it was killed, or left by os._exit)", "killed"),
    ],
)
def test_a_rank_that_ended_without_a_word_comes_before_one_that_lost_it(tmp_path, code, said, kind):
    failure(tmp_path, lost(), 0, time_ns=1)
    report = root_cause(tmp_path, [Ending(rank=1, exit_code=code, time_ns=2)], world_size=2)
    assert (report.rank, report.kind) == (1, kind)
    assert block(report) == f"run failed: rank 1 of 2 (HOST) {said}\nalso ended: rank 0 (connection lost)\n"


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (lost(), True),
        (during(lost(), StepError("rank 1 did not come to step 3")), True),
        (during(ValueError("bad"), lost()), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_the_first_exception_of_a_chain_tells_a_consequence(tmp_path, error, consequence):
    assert failure(tmp_path, error, 0).consequence is consequence


def test_a_mistake_that_all_ranks_report_is_shown_once_and_names_no_rank(tmp_path):
    for rank in range(2):
        failure(tmp_path, DataError("corpus/: empty"), rank, time_ns=rank)
    assert block(root_cause(tmp_path, (), world_size=2)) == "run failed: corpus/: empty\n"


def test_a_mistake_on_one_rank_names_it(tmp_path):
    failure(tmp_path, DataError("corpus/: empty"), 1)
    assert block(root_cause(tmp_path, (), world_size=2)) == "run failed: corpus/: empty (rank 1 of 2 (HOST))\n"


def test_only_a_wrong_manifest_is_exit_code_2(tmp_path):
    problem = Problem(message="the table is empty", file="run.toml", line=3, column=1, table="train")
    assert wrong_manifest(failure(tmp_path, ManifestError([problem]), 0))
    assert not wrong_manifest(failure(tmp_path, DataError("corpus/: empty"), 0))


def test_progress_survives_its_writer_and_says_the_phase(tmp_path):
    folder = attempt_folder(tmp_path)
    with Progress(tmp_path, 3) as progress:
        assert LastSeen.read(folder, 3) == LastSeen(pid=os.getpid(), step=None, phase=RunPhase.STARTING)
        progress.update(2**40, RunPhase.SAVING)
    with Progress(tmp_path, 3):
        assert LastSeen.read(folder, 3) == LastSeen(pid=os.getpid(), step=2**40, phase=RunPhase.SAVING)
    assert LastSeen.read(folder, 4) is None


def test_progress_costs_less_than_two_microseconds(tmp_path):
    with Progress(tmp_path, 0) as progress:
        assert min(timeit.repeat(lambda: progress.update(7), number=1000, repeat=20)) / 1000 < 2e-6


def test_a_report_says_what_the_rank_did(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    with Progress(tmp_path, 0) as progress:
        progress.update(5, RunPhase.SAVING)
    report = FailureReport.from_exception(
        caught(OSError("disk full")), rank=0, world_size=1, folder=attempt_folder(tmp_path)
    )
    assert block(report).splitlines()[0] == (
        "run failed: rank 0 of 1 (HOST) raised OSError at step 5 while saving: disk full"
    )


@pytest.mark.parametrize(
    ("others", "problem", "said"),
    [
        ((), "/__0_0.distcp: damaged", "{newest} is the newest checkpoint, and the only one"),
        (
            ("step-2",),
            "/__0_0.distcp: damaged",
            "{newest} is the newest checkpoint, and the one before it is {folder}/step-2: --resume ",
        ),
        (
            ("step-2",),
            ": of another run: model.args.dim was 32 and is 64",
            "the newest complete checkpoint is {newest}",
        ),
    ],
)
def test_a_damaged_checkpoint_is_not_the_one_to_go_on_from(tmp_path, others, problem, said):
    folder = tmp_path / "checkpoints"
    for name in (*others, "step-4"):
        (folder / name).mkdir(parents=True)
        for part in (".metadata", "state.json"):
            (folder / name / part).write_text("{}")
    newest = folder / "step-4"
    error = CheckpointError(f"{newest}{problem}")
    report = FailureReport.from_exception(error, rank=0, world_size=1, folder=tmp_path)
    assert (
        report.render(tmp_path)
        .splitlines()[-1]
        .partition("; ")[2]
        .startswith(said.format(newest=newest, folder=folder))
    )


def as_rank(monkeypatch, **names):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "here", **names}.items():
        monkeypatch.setenv(name, value)


def test_is_rank_needs_what_it_puts_into_the_environment(monkeypatch):
    as_rank(monkeypatch)
    assert is_rank()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not is_rank()


def test_a_rank_returns_its_value_and_removes_the_report_of_an_earlier_run(tmp_path, monkeypatch):
    as_rank(monkeypatch)
    (tmp_path / "error.json").write_text("{}")
    assert rank_main(pow, 2, 5, output=tmp_path) == 32
    assert not (tmp_path / "error.json").exists()
    assert (attempt_folder(tmp_path) / "rank-0.finished").exists()


def test_a_rank_reports_to_torchrun_and_to_the_user(tmp_path, monkeypatch, capfd):
    as_rank(monkeypatch, TORCHELASTIC_ERROR_FILE=str(tmp_path / "elastic.json"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            rank_main(pow, "a", 2, output=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 3
    assert "raised TypeError before its first step: unsupported operand" in capfd.readouterr().err
    assert "TypeError" in json.loads((tmp_path / "elastic.json").read_text())["message"]["message"]
    assert json.loads((tmp_path / "error.json").read_text())["error"] == "TypeError"


@pytest.fixture
def signals_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_preemption_is_only_noted_and_a_second_one_is_ignored(signals_put_back):
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        assert preemption.received is signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGTERM)


def test_without_a_preemption_the_handlers_are_given_back(signals_put_back):
    with Preemption():
        pass
    assert {number: signal.getsignal(number) for number in signals_put_back} == signals_put_back
