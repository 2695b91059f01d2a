"""Groups of ranks on a real Slurm cluster: a node is lost and comes again, the job goes on, and so do the losses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.group_jobs import MANIFEST, STEPS, TOLERANCE, losses
from support.slurm_cluster import NEEDS_SLURM, running_cluster, until

from composer3d.jobs.group_slurm import group_slurm_script
from composer3d.jobs.request import JobRequest

pytestmark = [pytest.mark.slow, NEEDS_SLURM]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_of(folder, word):
    """Return Slurm's process of the step whose program has a word in its command line, and those below it, in order."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_text().split("\0")
        except OSError:  # it has ended
            continue
        line = " ".join(words)
        if Path(words[0]).name.startswith("python") and word in line and str(folder) in line:
            found.append(int(name))
    path = [next(pid for pid in found if parent_of(pid) not in found)]
    while not Path(f"/proc/{path[0]}/cmdline").read_text().startswith("slurmstepd"):
        path.insert(0, parent_of(path[0]))
    return path


@pytest.mark.parametrize("lost", [0, 1], ids=["processes of the first", "another node"])
def test_a_lost_machine_comes_again_and_the_job_has_the_losses_of_an_undisturbed_run(lost, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "run.toml").write_text(MANIFEST)
    request = JobRequest(
        manifest=str(tmp_path / "run.toml"),
        nodes=2,
        gpus_per_node=1,
        uses_gpus=False,
        output="out",
        grace_s=30,
        max_restarts=0,
        name="run",
        has_groups=True,
    )
    (tmp_path / "run.sh").write_text(group_slurm_script(request))
    (tmp_path / "slurm").mkdir()
    with running_cluster(tmp_path / "slurm") as cluster:
        number = cluster.said("sbatch", "--parsable", "run.sh", cwd=tmp_path)
        until(lambda: len(losses(tmp_path)) >= 3, "three steps are made")
        (secret,) = (tmp_path / "out" / "logs").glob(".secret-*")
        assert secret.stat().st_mode & 0o777 == 0o600
        processes = processes_of(tmp_path, f"--node-rank {lost}")
        assert not [pid for pid in processes if secret.read_text() in Path(f"/proc/{pid}/cmdline").read_text()]
        if lost:  # the node of the script, which is the first one, would end the job
            cluster.kill_node("n2")
        for pid in processes:  # the kernel ends the ranks with the last one
            os.kill(pid, signal.SIGKILL)
        if lost:
            cluster.start_node("n2")
        until(lambda: not cluster.said("squeue", "-h", "-j", number), "the job has ended")
    assert not secret.exists()
    out = (tmp_path / f"run-{number}.out").read_text()
    assert re.findall(r"machine \d \(n\d\) is lost", out) == [f"machine {lost} (n{lost + 1}) is lost"]
    told = (tmp_path / "out" / "logs" / f"slurm-{number}-0-1.log").read_text()
    assert ("this machine, node 1, knows who takes part in a step from now on" in told) is (lost == 0)
    alone = [sys.executable, "-m", "composer3d", "run", "run.toml", "--set", "run.output=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    found, undisturbed = losses(tmp_path), losses(tmp_path, "alone")
    assert list(found) == list(undisturbed) == list(range(1, STEPS + 1))
    for step, loss in undisturbed.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), step
