"""A second run in a folder, and the death of a launcher, as the command line meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks

LIMIT_S = 120
RUN = ["run", "run.toml", "--set", "run.output=out", "--set", "checkpoint.every=5"]


def started(*command):
    """Start a run that ends by itself only after long, and return it once it has trained for some steps."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [*RUN, "--set", "train.steps=1000000"]
    run = subprocess.Popen([*command, "-m", "composer3d", *arguments], env=environment, stderr=-1, text=True)
    deadline = time.monotonic() + LIMIT_S
    while not Path("out/checkpoints/latest").exists():
        assert run.poll() is None and time.monotonic() < deadline, run.stderr.read()
        time.sleep(0.05)
    return run


def content(folder):
    """Return the names in a run's folder and what of it no step of the run itself changes."""
    names = {path.name for path in folder.iterdir()}
    return names, (folder / "manifest.toml").read_text(), (folder / ".lock").read_text()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN], ids=["local", "torchrun"])
def test_a_second_run_is_refused_and_the_first_goes_on(folder, capfd, launcher):
    with limit_ranks(2):
        first = started(*launcher)
        try:
            before = content(folder / "out")
            pid = json.loads((folder / "out" / ".lock").read_text())["pid"]
            for more in ([], ["--resume", "never"], ["--resume", "out"]):
                assert main([*RUN, *more]) == 3
                told = capfd.readouterr()
                assert told.out == ""
                (refused,) = told.err.splitlines()  # before anything is checked
                assert refused.startswith(f"out: another run is in this folder: pid {pid} on ")
                assert f" This one (pid {os.getpid()} on " in refused
            assert content(folder / "out") == before
            assert first.poll() is None
        finally:
            first.send_signal(signal.SIGTERM)
            _, err = first.communicate(timeout=LIMIT_S)
    assert not (folder / "out" / "error.json").exists()
    if launcher != TORCHRUN:  # which reports the signal that it had, as a failure of its own
        assert first.returncode == 0, err
        assert not (folder / "out" / ".lock").exists()


def test_after_a_killed_launcher_the_folder_is_free_at_once(folder, capfd):
    with limit_ranks(2):
        first = started(sys.executable)
        first.kill()
        assert main([*RUN, "--set", "train.steps=1"]) == 0  # which is done long ago
    assert " is finished: " in capfd.readouterr().err
    first.communicate(timeout=LIMIT_S)
