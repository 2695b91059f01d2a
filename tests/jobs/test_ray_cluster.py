"""A real Ray cluster on this machine: a world of the nodes that are there, and groups of ranks of which one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer3d.jobs.group_ray import group_ray_driver
from composer3d.jobs.ray_driver import ray_driver
from composer3d.jobs.request import JobRequest

MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out"
run.nodes = "1:2"
train.steps = 10
train.global_batch = 16
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 5
mesh.dp_shard = -1
mesh.gpus_per_node = 1
"""
GROUPS = """\
composer3d = 1
extends = "quickstart"
train.steps = 12
train.global_batch = 16
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 1000
mesh.replica = 2
mesh.dp_shard = 1
communication.replicas.minimum = 2
"""
LIMIT_S = 400
TOLERANCE = 2e-6  # of float32 sums in another order

pytestmark = pytest.mark.slow


def losses(folder, output="out"):
    """Return the loss of each step that a run's metrics have."""
    file = folder / output / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture
def cluster(monkeypatch):
    pytest.importorskip("ray", reason="needs ray, for a cluster of its own")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15, by default, where other work is on the machine
    from ray.cluster_utils import Cluster

    # As of many clusters, the first node computes nothing.
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield found
    finally:
        found.shutdown()


@pytest.mark.parametrize("there", [1, 2])
def test_a_job_of_a_range_of_nodes_is_one_world_on_those_that_are_there(cluster, there, tmp_path):
    for _ in range(there):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    (tmp_path / "run.toml").write_text(MANIFEST)
    request = JobRequest(
        manifest=str(tmp_path / "run.toml"),
        nodes=2,
        least_nodes=1,
        gpus_per_node=1,
        uses_gpus=False,
        output="out",
        grace_s=30,
        max_restarts=0,
        name="run",
        overrides=(f"run.output={tmp_path / 'out'}",),
    )
    (tmp_path / "driver.py").write_text(ray_driver(request))
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path)) == list(range(1, 11))
    assert f"dp_shard={there} x" in done.stdout + done.stderr


def launcher_of(folder, words):
    """Return the process that starts a machine's groups, once it is there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                line = file.read_text().replace("\0", " ")
                if words in line and str(folder) in line:
                    return int(file.parent.name)
    raise AssertionError(f"no process {words}")


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def raylet_of(machine):
    """Return the process by which Ray runs a machine of the cluster."""
    return machine.all_processes["raylet"][0].process.pid


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_lost_comes_again_and_the_losses_are_those_of_an_undisturbed_run(lost, cluster, tmp_path):
    machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    manifest = tmp_path / "run.toml"
    manifest.write_text(GROUPS)
    request = JobRequest(
        manifest=str(manifest),
        nodes=2,
        gpus_per_node=1,
        uses_gpus=False,
        output="out",
        grace_s=30,
        max_restarts=0,
        name="run",
        overrides=(f"run.output={tmp_path / 'out'}",),
        has_groups=True,
    )
    (tmp_path / "driver.py").write_text(group_ray_driver(request))
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path, env=environment, stdout=log, stderr=log) as job,
    ):
        deadline = time.monotonic() + LIMIT_S
        while len(losses(tmp_path)) < 3:
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        launcher = launcher_of(tmp_path, f"--node-rank {lost}")
        raylet = parent_of(parent_of(launcher))
        os.kill(launcher, signal.SIGKILL)
        cluster.remove_node(next(each for each in machines if raylet_of(each) == raylet))
        cluster.add_node(num_cpus=1)
        assert job.wait(LIMIT_S) == 0, (tmp_path / "log").read_text()
    told = (tmp_path / "log").read_text()
    assert [f"machine {rank} is lost" in told for rank in range(2)] == [lost == 0, lost == 1]
    assert ("this machine, node 1, knows who takes part in a step from now on" in told) is (lost == 0)
    alone = [sys.executable, "-m", "composer3d", "run", "run.toml", "--set", f"run.output={tmp_path / 'alone'}"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    found, undisturbed = losses(tmp_path), losses(tmp_path, "alone")
    assert list(found) == list(undisturbed) == list(range(1, 13))
    for step, loss in undisturbed.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), step
