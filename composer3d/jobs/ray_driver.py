"""Driver for a Ray cluster: one torchrun a node, each in an actor of its own that holds the node's GPUs."""

from __future__ import annotations

import json

from composer3d.jobs.request import JobRequest

__all__ = ["ray_driver"]

_DRIVER = '''\
{comment}"""Started by: ray job submit --working-dir . -- python {name}.py"""

import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS = {nodes}, {gpus}
TORCHRUN = {torchrun}


@ray.remote(max_restarts=0)
class Node:
    def meeting_point(self):
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{{ray.util.get_node_ip_address()}}:{{listener.getsockname()[1]}}"

    def run(self, endpoint):
        command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv-endpoint={{endpoint}}", *TORCHRUN]
        return subprocess.run(command).returncode


ray.init()
group = placement_group([{{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}] * NODES, strategy={strategy})
ray.get(group.ready())
nodes = [
    Node.options(
        num_cpus=1,
        num_gpus=GPUS,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote()
    for index in range(NODES)
]
endpoint = ray.get(nodes[0].meeting_point.remote())
codes = ray.get([node.run.remote(endpoint) for node in nodes])
sys.exit(max(codes))
'''


def ray_driver(request: JobRequest) -> str:
    """Return the Python file that `ray job submit` runs.

    A placement group reserves all machines before any rank starts (STRICT_SPREAD: one bundle a machine), so that two
    jobs never wait for each other's half. Ranks are processes of torchrun, not of Ray: signals, cores and logs are as
    elsewhere.

    Args:
        request: What is to be started.
    """
    torchrun = request.torchrun("--rdzv-backend=c10d", f"--rdzv-id={request.name}")
    return _DRIVER.format(
        comment=request.comment(),
        name=request.name,
        nodes=request.nodes,
        gpus=request.gpus_per_node if request.uses_gpus else 0,
        torchrun=json.dumps(torchrun, indent=4),
        strategy='"STRICT_SPREAD"',
    )
