"""Driver for a Ray cluster: one torchrun a node, each in an actor of its own that holds the node's GPUs."""

from __future__ import annotations

import json

from composer3d.jobs.request import JobRequest

__all__ = ["ray_driver"]

_DRIVER = '''\
{comment}"""Started by: ray job submit --working-dir . -- python {name}.py"""

import ctypes
import os
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LEAST, MOST, GPUS = {least}, {nodes}, {gpus}
TORCHRUN = {torchrun}
ENVIRONMENT = {environment}
BUNDLE = {{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}


def end_with_actor():
    """Have the kernel end torchrun, and it its ranks, when this actor's process is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@ray.remote(max_restarts=0)
class Node:
    def meeting_point(self):
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{{ray.util.get_node_ip_address()}}:{{listener.getsockname()[1]}}"

    def run(self, endpoint, nodes, index):
        command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv-endpoint={{endpoint}}"]
        # Said, not found out: a machine of several addresses does not know each of them for its own.
        command += [f"--nnodes={{nodes}}", f"--rdzv-conf=is_host={{int(index == 0)}}", *TORCHRUN]
        environment = {{**os.environ, **ENVIRONMENT}}
        return subprocess.run(command, env=environment, preexec_fn=end_with_actor).returncode


def num_nodes():
    """Return how many of the machines that are there the run takes."""
    there = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    fitting = [each for each in there if all(each.get(kind, 0) >= count for kind, count in BUNDLE.items())]
    return max(LEAST, min(MOST, len(fitting)))


ray.init()
group = placement_group([BUNDLE] * num_nodes(), strategy={strategy})
ray.get(group.ready())
nodes = [
    Node.options(
        num_cpus=1,
        num_gpus=GPUS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote()
    for index in range(group.bundle_count)
]
endpoint = ray.get(nodes[0].meeting_point.remote())
codes = ray.get([node.run.remote(endpoint, len(nodes), index) for index, node in enumerate(nodes)])
sys.exit(max(codes))
'''


def ray_driver(request: JobRequest) -> str:
    """Return the Python file that `ray job submit` runs.

    A placement group reserves all machines before any rank starts (STRICT_SPREAD: one bundle a machine), so that two
    jobs never wait for each other's half. Of a range of nodes it takes as many as are there when it begins; where one
    is lost the job fails, and submitted again it goes on from the newest checkpoint on those that are left. Ranks are
    processes of torchrun, not of Ray: signals, cores and logs are as elsewhere.

    Args:
        request: What is to be started.
    """
    shell = request.torchrun("--rdzv-backend=c10d", f"--rdzv-id={request.name}")
    torchrun = [word for word in shell if not word.startswith("--nnodes=")]
    return _DRIVER.format(
        comment=request.comment(),
        name=request.name,
        least=request.least,
        nodes=request.nodes,
        environment=json.dumps(request.environment),
        gpus=request.gpus_per_node if request.uses_gpus else 0,
        torchrun=json.dumps(torchrun, indent=4),
        strategy='"STRICT_SPREAD"',
    )
