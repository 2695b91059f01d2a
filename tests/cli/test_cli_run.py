from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from composer3d.checking.check import open_manifest
from composer3d.cli import main
from composer3d.processes.forking import limit_ranks
from composer3d.runner.launching.local_ranks import num_local_ranks


@pytest.fixture
def run(folder, capfd):
    """Run a manifest on ranks of this machine; return the exit code, standard output and standard error."""

    def start(*arguments):
        with limit_ranks(2):
            code = main(["run", "run.toml", "--set", "run.output=out", *arguments])
        told = capfd.readouterr()
        return code, told.out, told.err

    return start


def rows(folder):
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_resumes_and_says_when_it_is_finished(folder, run):
    code, out, err = run()
    assert code == 0, err
    assert (code, [row["step"] for row in rows(folder)]) == (0, [1, 2])
    assert re.fullmatch(r"finished: 2 steps, loss \d\.\d{4}; out\n", out)
    assert err.startswith(
        "starting 2 ranks on cpu\ntraining to out: pp=1 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=1, 2 steps\n"
    )
    code, out, err = run("--set", "train.steps=3")
    assert code == 0, err
    assert (code, [row["step"] for row in rows(folder)]) == (0, [1, 2, 3])
    assert "\ngoing on from out/checkpoints/step-2: " in err
    assert "train.steps was 2 and is 3, so the learning-rate schedule is another one: step 3 takes " in err
    code, out, err = run("--set", "train.steps=3")
    assert (code, out) == (0, "")
    assert err.startswith("starting 2 ranks on cpu\nout is finished: 3 steps are done")


def test_a_rank_that_fails_is_exit_code_3_and_one_report(folder, run):
    (folder / "cli_rows.py").write_text(
        "class Rows:\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, number):\n        raise OSError(f'row {number} is unreadable')\n"
    )
    code, out, err = run("--set", "data.use=cli_rows:Rows", "--set", "model.args.vocab_size=9")
    assert (code, out) == (3, "")
    assert len(re.findall("^run failed: rank [01] of 2 ", err, re.MULTILINE)) == 1
    assert err.count("Traceback") == 1 and "is unreadable" in err
    assert (folder / "out" / "error.json").exists()


def test_a_mistake_is_found_before_any_rank_is_started(folder, run):
    code, out, err = run("--nproc-per-node", "3")
    assert (code, out) == (2, "")
    assert err == "run.toml:4:2: [mesh] dp_shard=2, but the world has 3 ranks\n1 problem\n"
    assert not (folder / "out").exists()


def test_a_factory_that_dies_takes_only_the_check_with_it(folder, run):
    (folder / "cli_dying.py").write_text("import os\n\ndef build(vocab_size):\n    os._exit(9)\n")
    code, _, err = run("--set", "model.use=cli_dying:build")
    told = '"cli_dying:build" ended the process, which ended with exit code 9, when it was called'
    assert (code, err) == (2, f"--set model.use=cli_dying:build: [model] {told}\n1 problem\n")


def test_a_process_that_cannot_fork_ranks_is_exit_code_3(folder):
    """OpenMP's threads, started by an operator before, would be missing in every rank."""
    script = (
        "import sys, torch\ntorch.set_num_threads(2)\ntorch.ones(1 << 17).add_(1)\n"
        "from composer3d.cli import main\nsys.exit(main(['run', 'run.toml']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("ranks cannot be forked from this process: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("mesh", "device", "num_gpus", "expected"),
    [
        ("", "cpu", 0, 1),
        ("dp_shard = 2\n", "cpu", 0, 2),
        ("dp_shard = -1\ndp_replicate = 2\n", "cpu", 0, 2),
        ("", "cuda", 8, 8),
        ("dp_shard = -1\ndp_replicate = 3\n", "cuda", 8, 6),
        ("dp_shard = 2\ndp_replicate = 2\n", "cuda", 8, 4),
        ("dp_shard = 16\n", "cuda", 8, 16),
        ("tp = 2\n", "cuda", 8, None),
    ],
)
def test_how_many_ranks_are_started(mesh, device, num_gpus, expected, edited, monkeypatch):
    edited("dp_shard = 2\n", mesh)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_gpus)
    assert num_local_ranks(open_manifest("run.toml", []).manifest, torch.device(device)) == expected


def test_a_device_that_is_not_there_is_refused(folder, run):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, _, err = run("--set", "run.device=cuda")
    told = '--set run.device=cuda: [run] device = "cuda", and this machine has none\n1 problem\n'
    assert (code, err) == (2, told)


ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def test_under_torchrun_it_joins(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "composer3d", "run", "run.toml", "--set", "run.output=out"]
    with limit_ranks(2):
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert re.fullmatch(r"finished: 2 steps, loss \d\.\d{4}; out\n", done.stdout)


def test_a_rank_under_torchrun_tells_what_is_wrong_with_the_manifest(folder):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}
    command = [sys.executable, "-m", "composer3d", "run", "run.toml", "--set", "train.stepz=1"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT | rank, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        '--set train.stepz=1: [train] unknown key "stepz"; did you mean "steps"?\n'
        "run.toml:4:2: [mesh] dp_shard=2, but the world has 3 ranks\n"
    )
