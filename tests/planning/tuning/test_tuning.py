"""Suggestions measured: halving keeps the fastest, trials time real steps, the best becomes a manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile

import pytest
from support.sockets import watched_listeners

from composer3d.checking import open_manifest
from composer3d.cli import main
from composer3d.errors import ComposerError
from composer3d.planning.tuning.halving import halve, paired, rank_correlation
from composer3d.planning.tuning.trial import Measured, measure_in_turns, measure_steps
from composer3d.planning.tuning.tune import Trial, TuneResult, tune_on_machine

TEXT = """composer3d = 1
run.device = "cpu"
[model.args]
dim = 32
num_layers = 2
num_heads = 2
[data]
use = "synthetic"
seq_len = 16
[train]
steps = 1000
global_batch = 8
[sharding.fsdp2]
"""


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def never(candidates, num_steps):
    raise AssertionError("a single candidate has no turns")


def test_halving_measures_the_faster_half_for_twice_as_many_steps():
    calls = []

    def measure(candidate, num_steps):
        calls.append((candidate, num_steps))
        return [5.0, 3.0, 4.0, 1.0, 2.0][candidate]

    def in_turns(candidates, num_steps):
        calls.append((tuple(candidates), num_steps))
        return {candidate: [float(candidate), float(candidate)] for candidate in candidates}

    found = halve(range(5), measure, in_turns, num_steps=4)
    assert calls == [
        *((candidate, 4) for candidate in range(5)),
        *((candidate, 8) for candidate in (3, 4, 1)),
        ((3, 4), 16),
    ]
    assert found == {
        0: [5.0],
        1: [3.0, 3.0],
        2: [4.0],
        3: [1.0, 1.0, pytest.approx(3)],
        4: [2.0, 2.0, pytest.approx(4)],
    }


def test_who_is_nearly_as_fast_stays_and_the_turns_decide():
    """Of four within a tenth none is left out after the first round: all are measured in turns."""
    asked = []

    def in_turns(candidates, num_steps):
        asked.append((tuple(candidates), num_steps))
        return {candidate: [4.0 - candidate] * 3 for candidate in candidates}

    found = halve(range(4), lambda candidate, steps: 1.0 + candidate / 40, in_turns, num_steps=4)
    assert asked == [((0, 1, 2, 3), 8)]
    assert min(found, key=lambda candidate: found[candidate][-1]) == 3
    asked.clear()
    found = halve(range(5), lambda candidate, steps: 1.0 + candidate / 25, in_turns, num_steps=4)
    assert asked == [((0, 1, 2), 16)]  # half of them in the round before, and all three within a tenth
    assert [len(figures) for figures in found.values()] == [3, 3, 3, 1, 1]


def test_turns_are_compared_one_by_one():
    """A machine that is half as fast from the third turn on decides nothing, nor a burst in one turn of one of them."""
    slower = [1.0, 1.0, 2.0, 2.0, 2.0]
    turns = {7: [1.00 * each for each in slower], 8: [1.02 * each for each in slower]}
    turns[7][1] *= 3
    found = paired(turns)
    assert found[8] / found[7] == pytest.approx(1.02)
    assert found[7] == pytest.approx(2.0 * 1.0, rel=0.02)
    assert paired({}) == {}


def test_a_candidate_that_fails_is_out_and_all_may_fail():
    def in_turns(candidates, num_steps):
        return {candidate: [float(candidate)] for candidate in candidates if candidate != 1}

    found = halve(
        range(3), lambda candidate, steps: None if candidate == 0 else float(candidate), in_turns, num_steps=1
    )
    assert found == {0: [], 1: [1.0], 2: [2.0, pytest.approx(2.0)]}
    assert halve(range(3), lambda candidate, steps: None, never, num_steps=1) == {0: [], 1: [], 2: []}
    assert halve(range(2), lambda candidate, steps: 1.0, lambda candidates, steps: {}, num_steps=1) == {0: [], 1: []}
    assert halve([0], lambda candidate, steps: 1.0, never, num_steps=1) == {0: [1.0]}


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 2, 3], [1, 3, 2], 1 / 3), ([1], [1], None)],
)
def test_rank_correlation(one, other, tau):
    assert rank_correlation(one, other) == (None if tau is None else pytest.approx(tau))


def result(manifest, **changes):
    trials = (
        Trial(
            layout="pp=2",
            changes=("mesh.pp=2", "train.microbatch=4"),
            planned_s=0.1,
            measured_s=(0.2, 0.21),
            num_steps=14,
            is_compared=True,
        ),
        Trial(layout="dp_shard=2", changes=("mesh.dp_shard=2",), planned_s=0.2, measured_s=(0.4,), num_steps=4),
        Trial(layout="tp=2", changes=("mesh.tp=2",), planned_s=0.3, measured_s=(), failure="out of memory"),
    )
    values = {"trials": trials, "correction": 2.0, "tau": 1.0, "hardware": "h100", "manifest": str(manifest)}
    return TuneResult(**{**values, **changes})


def test_the_best_becomes_a_manifest_with_the_table_above_it(manifest, tmp_path):
    path = tmp_path / "best.toml"
    result(manifest).write(path)
    loaded = open_manifest(str(path), ()).manifest
    assert loaded.degrees["pp"] == 2 and loaded.tables["train"].microbatch == 4
    lines = path.read_text().splitlines()
    assert lines[0] == "#    planned   measured rounds  layout"
    assert "0.1 s     0.21 s      2  pp=2" in lines[1] and "failed" in lines[3] and "out of memory" in lines[4]
    assert lines[5] == "# measured times are 2 of those planned on h100; order of planned and measured times: tau +1.00"
    with pytest.raises(ComposerError, match="cannot be written: File exists"):
        result(manifest).write(path)


def test_a_choice_without_turns_says_on_how_many_steps_it_stands(manifest):
    trials = (
        Trial(layout="pp=2", changes=(), planned_s=0.1, measured_s=(0.2,), failure="out of memory", num_steps=1),
        Trial(layout="dp=2", changes=(), planned_s=0.2, measured_s=(0.4,), failure="out of memory", num_steps=1),
    )
    lines = str(result(manifest, trials=trials)).splitlines()
    assert lines[2].strip() == "out of memory; the time is that of 1 steps before"
    assert lines[5] == "the last comparison, in turns, has failed: the choice stands on 1 steps"
    compared = tuple(dataclasses.replace(trial, failure="", num_steps=14, is_compared=True) for trial in trials)
    assert "stands on" not in str(result(manifest, trials=compared))
    assert "stands on" not in str(result(manifest, trials=compared[:1]))


def test_a_process_of_a_launcher_tunes_nothing(manifest, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(ComposerError, match="tune starts the ranks of every trial itself, on one machine"):
        tune_on_machine(manifest, num_ranks=2, hardware="h100")


def test_a_file_that_is_there_is_refused_before_anything_runs(manifest, tmp_path, capsys):
    (tmp_path / "best.toml").write_text("mine")
    output = str(tmp_path / "best.toml")
    assert main(["tune", str(manifest), "--nproc-per-node", "2", "--output", output]) == 2
    assert "is there, and would be replaced" in capsys.readouterr().err
    assert (tmp_path / "best.toml").read_text() == "mine"


@pytest.mark.slow
def test_a_trial_times_real_steps_and_leaves_no_process(manifest, tmp_path):
    place = tmp_path / "trial"
    place.mkdir()
    with watched_listeners() as addresses:
        measured = measure_steps(
            str(manifest), ["mesh.dp_shard=2"], num_ranks=2, num_steps=3, folder=place, timeout_s=300
        )
    assert addresses == {"127.0.0.1"}
    assert measured.step_s is not None and measured.step_s > 0 and measured.failure == ""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert 5 <= len(rows) < 1000
    assert _running(place) == []


@pytest.mark.slow
def test_runs_that_take_turns_are_held_meanwhile_and_leave_no_process(manifest, tmp_path):
    layouts = {4: ["mesh.dp_shard=2"], 5: ["mesh.dp_replicate=2"], 6: ["mesh.dp_shard=3"]}
    found = measure_in_turns(
        str(manifest), layouts, num_ranks=2, num_steps=2, num_turns=3, folder=tmp_path / "turns", timeout_s=300
    )
    assert isinstance(found[6], Measured) and "dp_shard" in found[6].failure
    for number in (4, 5):
        place = tmp_path / "turns" / str(number)
        assert _running(place) == []
        times = [json.loads(line)["step_time_s"] for line in (place / "metrics.jsonl").read_text().splitlines()]
        # Each was held while the other had its turn, of at least three steps: a step took as long as that.
        assert sum(each > 2 * min(found[5 if number == 4 else 4]) for each in times) >= 2
        assert len(found[number]) == 3 and max(found[number]) < max(times)


def _running(place):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and str(place) in _command_line(pid)]


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


TUNER = """import sys
from pathlib import Path
from composer3d.planning.tuning.trial import Measured, measure_in_turns, measure_steps
sys.executable = sys.argv[1]
measure_steps("run.toml", [], num_ranks=1, num_steps=1, folder=Path(sys.argv[2]), timeout_s=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kernels of others do not end a process with its parent")
def test_a_trial_ends_with_the_process_that_measures_it(tmp_path):
    """A run that would last is ended by the kernel where the process that started it cannot."""
    command, told = tmp_path / "run.sh", tmp_path / "told"
    command.write_text(f"#!/bin/sh\necho $$ > '{told}'\nexec sleep 600\n")
    command.chmod(0o700)
    os.mkfifo(told)
    with contextlib.ExitStack() as stack:
        reading = os.open(told, os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, reading)
        tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(command), str(tmp_path / "trial")])
        stack.callback(tuner.wait)
        stack.callback(tuner.kill)
        assert select.select([reading], [], [], 120)[0]
        trial = os.pidfd_open(int(os.read(reading, 64)))
        stack.callback(os.close, trial)
        tuner.terminate()
        assert select.select([trial], [], [], 60)[0], "it ends"


@pytest.mark.slow
def test_a_trial_that_fails_says_why(manifest, tmp_path):
    place = tmp_path / "trial"
    place.mkdir()
    measured = measure_steps(str(manifest), ["mesh.dp_shard=3"], num_ranks=2, num_steps=3, folder=place, timeout_s=300)
    assert measured.step_s is None and "dp_shard" in measured.failure


@pytest.mark.slow
def test_an_error_of_a_trials_model_is_told(manifest, tmp_path):
    (tmp_path / "bad.py").write_text(
        "from composer3d.models.llama import Llama, llama\n\nclass Bad(Llama):\n    def forward(self, tokens):\n"
        "        if not tokens.is_meta:\n            raise ZeroDivisionError('in the forward')\n"
        "        return super().forward(tokens)\n\ndef bad(**sizes):\n    model = llama(**sizes)\n"
        "    model.__class__ = Bad\n    return model\n"
    )
    place = tmp_path / "trial"
    place.mkdir()
    measured = measure_steps(
        str(manifest), ["model.use=bad:bad"], num_ranks=1, num_steps=3, folder=place, timeout_s=300
    )
    assert measured.step_s is None and "in the forward" in measured.failure


@pytest.mark.slow
def test_what_is_suggested_is_measured_and_the_fastest_is_the_best(manifest, tmp_path):
    lines = []
    found = tune_on_machine(
        manifest, num_ranks=2, hardware="h100", keep=["microbatch"], num_steps=2, report=lines.append
    )
    timed = [trial for trial in found.trials if trial.measured_s]
    assert found.ok and len(timed) >= 2
    assert len(found.best.measured_s) == max(len(trial.measured_s) for trial in timed)
    rounds = len(found.best.measured_s)
    assert found.best.measured_s[-1] == min(trial.measured_s[-1] for trial in timed if len(trial.measured_s) == rounds)
    assert found.correction > 1  # a core of this machine is slower than an H100
    assert len(lines) == sum(len(trial.measured_s) + bool(trial.failure) for trial in found.trials)


@pytest.mark.slow
def test_a_manifest_of_few_steps_is_compared_in_turns(manifest, tmp_path, monkeypatch):
    """Turns want more steps than it has; and no trial leaves a folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pins = ["pp=1", "microbatch", "recompute=none", "tp=1", "cp=1"]
    found = tune_on_machine(
        manifest, num_ranks=2, hardware="h100", keep=pins, num_steps=1, overrides=["train.steps=3"], memory_bytes=2**36
    )
    assert len(found.trials) > 1 and [trial.failure for trial in found.trials] == [""] * len(found.trials)
    assert found.best.is_compared and found.best.num_steps >= 14
    assert [path.name for path in tmp_path.glob("composer3d-*.*")] == []
