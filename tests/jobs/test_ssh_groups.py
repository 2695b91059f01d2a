"""Groups of ranks that a job starts over ssh: its first machine is lost, and the others go on; ssh is a shell here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.group_jobs import MANIFEST, STEPS, TOLERANCE, losses
from support.process_trees import send_to_tree
from support.slurm_cluster import free_ports

from composer3d.jobs.group_ssh import group_ssh_script
from composer3d.jobs.request import JobRequest

SSH = '#!/bin/bash\nexec bash -c "${!#}"\n'
LIMIT_S = 400


@pytest.mark.slow
def test_where_the_first_machine_is_lost_the_other_goes_on_without_a_start_from_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PORT", str(free_ports(1)[0]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "run.toml").write_text(MANIFEST)
    request = JobRequest(
        manifest=str(tmp_path / "run.toml"),
        nodes=2,
        gpus_per_node=1,
        uses_gpus=False,
        output="out",
        grace_s=30,
        max_restarts=0,  # of all
        name="run",
        hosts=("127.0.0.2", "127.0.0.3"),
        has_groups=True,
    )
    command = ["bash", "-c", group_ssh_script(request)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, text=True) as job,
    ):
        deadline = time.monotonic() + LIMIT_S
        while len(losses(tmp_path)) < 3:
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        (pid,) = (tmp_path / "out" / "logs").glob(".pid-*-0")
        send_to_tree(int(pid.read_text()), signal.SIGKILL)
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    told = [line for line in (tmp_path / "log").read_text().splitlines() if "is lost" in line]
    assert told == ["machine 0 (127.0.0.2) is lost (exit code 137), and started again"]
    other = (tmp_path / "out" / "logs" / "ssh-1.log").read_text()
    assert other.count("starting 1 rank on cpu, node 1 of 2") == 1
    assert "this machine, node 1, knows who takes part in a step from now on" in other
    alone = [sys.executable, "-m", "composer3d", "run", "run.toml", "--set", "run.output=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    found, undisturbed = losses(tmp_path), losses(tmp_path, "alone")
    assert list(found) == list(undisturbed) == list(range(1, STEPS + 1))
    for step, loss in undisturbed.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), step
