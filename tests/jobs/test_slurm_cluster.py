"""A real Slurm cluster of two nodes on this machine: ranks join by srun, a job ends, is queued again and goes on."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.slurm_cluster import NEEDS_SLURM, running_cluster, until

import composer3d

MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out"
train.steps = 40
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 1000
"""

pytestmark = [pytest.mark.slow, NEEDS_SLURM]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def steps(folder):
    """Return the steps of a run's metrics."""
    file = folder / "out" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("more", [[], ["--mpi=pmi2"]], ids=["plain", "pmi2"])
def test_tasks_of_srun_are_one_world(more, cluster, tmp_path):
    (tmp_path / "run.toml").write_text(MANIFEST.replace("40", "2"))
    command = [sys.executable, "-m", "composer3d", "run", "run.toml"]
    out = cluster.said("srun", "-N2", "--ntasks-per-node=1", *more, *command, cwd=tmp_path)
    assert out.count("finished: 2 steps") == 1
    assert steps(tmp_path) == [1, 2]


def test_a_job_that_is_told_of_its_end_saves_and_goes_on(cluster, tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_CONF", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    job = composer3d.launch("run.toml", on="slurm", nodes=2, gpus_per_node=1)
    number = job.submit().split()[-1]
    until(lambda: len(steps(tmp_path)) >= 3, "three steps are made")
    cluster.said("scancel", "--signal=USR1", "--batch", number)
    until(lambda: cluster.said("squeue", "-h", "-j", number, "-o", "%r") == "BeginTime", "the job is queued again")
    saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "out" / "checkpoints").glob("step-*")]
    assert saved  # before its interval of 1000 steps
    assert max(saved) < 40
    until(lambda: not cluster.said("squeue", "-h", "-j", number), "the job has ended")
    assert steps(tmp_path) == list(range(1, 41))
    logs = sorted(path.name for path in (tmp_path / "out" / "logs").glob("*.log"))
    assert logs == [f"slurm-{number}-{restart}-{node}.log" for restart in (0, 1) for node in (0, 1)]
