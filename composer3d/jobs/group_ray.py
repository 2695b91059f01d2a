"""Driver for a Ray cluster that starts groups of ranks, in an actor a machine: one that is lost is placed again."""

from __future__ import annotations

import json

from composer3d.jobs.request import JobRequest

__all__ = ["group_ray_driver"]

_DRIVER = '''\
{comment}"""Started by: ray job submit --working-dir . -- python {name}.py"""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS, MAX_RESTARTS = {nodes}, {gpus}, {max_restarts}
COMMAND = {command}
BUNDLE = {{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}
FINAL = (0, 2, 3)  # to start a machine again would change nothing; all else is a loss, of it or of machine 0


def end_with_actor():
    """Have the kernel end the groups' launcher, and it its ranks, when this actor's process is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@ray.remote(max_restarts=0)
class Node:
    def meeting_point(self):
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{{ray.util.get_node_ip_address()}}:{{listener.getsockname()[1]}}"

    def run(self, secret, endpoint, rank):
        environment = {{**os.environ, "COMPOSER3D_QUORUM_TOKEN": secret}}
        command = [sys.executable, *COMMAND, "--node-rank", str(rank), "--endpoint", endpoint]
        return subprocess.run(command, env=environment, preexec_fn=end_with_actor).returncode


def placed(rank):
    """Return an actor on the machine of a bundle, which Ray gives another machine where it is lost."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return Node.options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=strategy).remote()


def start(rank):
    """Start the groups of a machine; returns what will be its exit code."""
    actors[rank] = placed(rank)
    return actors[rank].run.remote(secret, endpoint, rank)


def ended(result):
    """Return the exit code of a machine; -1 where it, or its actor, is lost."""
    try:
        return ray.get(result)
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr)
        return -1


def train():
    """Start all machines, and those that are lost again, until the first one has ended; returns its exit code."""
    running = {{start(rank): rank for rank in range(1, NODES)}} | {{actors[0].run.remote(secret, endpoint, 0): 0}}
    while True:
        (result,), _ = ray.wait(list(running))
        rank, code = running.pop(result), ended(result)
        if rank == 0:
            if running:  # they end with the run, but for those that are lost
                ray.wait(list(running), num_returns=len(running), timeout=60)
            return code
        if code not in FINAL:
            print(f"machine {{rank}} is lost (exit code {{code}}), and started again", file=sys.stderr)
            time.sleep(2)
            running[start(rank)] = rank


ray.init()
group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
secret, actors = secrets.token_hex(16), {{}}
for _ in range(MAX_RESTARTS + 1):
    actors[0] = placed(0)
    endpoint = ray.get(actors[0].meeting_point.remote())
    code = train()
    if code in FINAL:
        break
    print(f"machine 0 is lost (exit code {{code}})", file=sys.stderr)
sys.exit(code if code >= 0 else 1)
'''


def group_ray_driver(request: JobRequest) -> str:
    """Return the Python file that `ray job submit` runs.

    A placement group reserves all machines before any rank starts (STRICT_SPREAD: one bundle a machine). Where a
    machine is lost, Ray places its bundle on another one, and its groups come back there. The secret is passed from
    actor to actor, and stands in no command line and no file.

    Args:
        request: What is to be started.
    """
    return _DRIVER.format(
        comment=request.comment(),
        name=request.name,
        nodes=request.nodes,
        gpus=request.gpus_per_node if request.uses_gpus else 0,
        max_restarts=request.max_restarts,
        command=json.dumps(request.machine(), indent=4),
    )
