"""Driver for a Ray cluster that starts groups of ranks, in an actor a machine: one that is lost is placed again."""

from __future__ import annotations

import json

from composer3d.jobs.group_shell import NUM_SERVERS
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

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, SERVERS, GPUS, MAX_RESTARTS = {nodes}, {num_servers}, {gpus}, {max_restarts}
COMMAND = {command}
BUNDLE = {{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}
FINAL = (0, 2, 3)  # to start a machine again would change nothing; all else is a loss, or it has left


def end_with_actor():
    """Have the kernel end the groups' launcher, and it its ranks, when this actor's process is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@ray.remote(max_restarts=0)
class Node:
    def meeting_point(self):
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{{ray.util.get_node_ip_address()}}:{{listener.getsockname()[1]}}"

    def run(self, secret, endpoints, rank):
        if rank < len(endpoints) and endpoints[rank].rpartition(":")[0] != ray.util.get_node_ip_address():
            endpoints = [*endpoints[:rank], self.meeting_point(), *endpoints[rank + 1 :]]  # in place of a lost machine
        environment = {{**os.environ, "COMPOSER3D_QUORUM_TOKEN": secret}}
        command = [sys.executable, *COMMAND, "--node-rank", str(rank), "--endpoint", ",".join(endpoints)]
        return subprocess.run(command, env=environment, preexec_fn=end_with_actor).returncode


def placed(rank):
    """Return an actor on the machine of a bundle, which Ray gives another machine where it is lost."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return Node.options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=strategy).remote()


def start(rank):
    """Start the groups of a machine; returns what will be its exit code."""
    return actors[rank].run.remote(secret, endpoints, rank)


def ended(result):
    """Return the exit code of a machine; -1 where it, or its actor, is lost."""
    try:
        return ray.get(result)
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr)
        return -1


def train():
    """Start all machines, and those that are lost again, until the run is over; returns its exit code."""
    running, losses = {{start(rank): rank for rank in range(NODES)}}, 0
    while True:
        ray.wait(list(running))
        done, _ = ray.wait(list(running), num_returns=len(running), timeout=2)  # with others that are lost at once
        codes = {{running.pop(result): ended(result) for result in done}}
        final = [code for code in codes.values() if code in FINAL]
        if final:
            others, _ = ray.wait(list(running), num_returns=len(running), timeout=60) if running else ([], [])
            return min(final + [code for code in map(ended, others) if code in FINAL])
        losses += not running
        if losses > MAX_RESTARTS:
            return max(codes.values())
        for rank, code in codes.items():
            print(f"machine {{rank}} is lost (exit code {{code}}), and started again", file=sys.stderr)
            actors[rank] = placed(rank)
            running[start(rank)] = rank


ray.init()
group = placement_group([BUNDLE] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
secret, actors = secrets.token_hex(16), [placed(rank) for rank in range(NODES)]
endpoints = ray.get([actor.meeting_point.remote() for actor in actors[:SERVERS]])
code = train()
sys.exit(code if code >= 0 else 1)
'''


def group_ray_driver(request: JobRequest) -> str:
    """Return the Python file that `ray job submit` runs.

    A placement group reserves all machines before any rank starts (STRICT_SPREAD: one bundle a machine). Where a
    machine is lost, Ray places its bundle on another one, and its groups come back there, with an address that the
    others do not have: it serves no run but one that is begun again. The secret is passed from actor to actor, and
    stands in no command line and no file.

    Args:
        request: What is to be started.
    """
    return _DRIVER.format(
        comment=request.comment(),
        name=request.name,
        nodes=request.nodes,
        num_servers=min(NUM_SERVERS, request.nodes),
        gpus=request.gpus_per_node if request.uses_gpus else 0,
        max_restarts=request.max_restarts,
        command=json.dumps(request.machine(), indent=4),
    )
