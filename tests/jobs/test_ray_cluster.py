"""A real Ray cluster on this machine: a job of a range of nodes is one world on those that are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
LIMIT_S = 400

pytestmark = pytest.mark.slow


def steps(folder):
    file = folder / "out" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def cluster():
    pytest.importorskip("ray", reason="needs ray, for a cluster of its own")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield found
    finally:
        found.shutdown()


@pytest.mark.parametrize("there", [1, 2])
def test_a_job_of_a_range_of_nodes_is_one_world_on_those_that_are_there(cluster, there, tmp_path):
    for _ in range(there - 1):
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
    assert steps(tmp_path) == list(range(1, 11))
    assert f"dp_shard={there} x" in done.stdout + done.stderr
