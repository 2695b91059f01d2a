"""Print on which addresses processes of a world listen: `listening_cases.py OUTPUT CASE ...`, or as a torchrun rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from support.sockets import listening, move_hostname

from composer3d.processes.forking import limit_ranks
from composer3d.runner.launching.launcher import launch_local, rank_main

SERVED = "127.0.0.7"


def step():
    """Run a step of a composed model, and print where this process and its parent listen."""
    import tempfile

    import torch

    import composer3d

    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.toml"
        manifest.write_text("composer3d = 1\n[sharding.fsdp2]\n")
        run = composer3d.compose(
            lambda: torch.nn.Linear(2, 2), manifest, loss_fn=lambda out, _: out.sum(), device="cpu"
        )
        with run.step(0):
            run.forward_backward(torch.ones(2, 2), target=torch.ones(2))
        # The parent of a world of one is outside of the namespace.
        parent = listening(os.getppid()) if "RANK" in os.environ else []
        print(json.dumps({"rank": listening(), "parent": parent}), flush=True)
        run.close()


def case_local(output):
    # An interface of a cluster's, which a world of one machine has no use for.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    with limit_ranks(2):
        assert launch_local(step, num_ranks=2, device="cpu", output=output).ok
    del os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]


def case_ranks(output):
    from composer3d.testing import run_ranks

    for found in run_ranks(listening, 2):
        print(json.dumps({"rank": found, "parent": []}))


def case_served(output):
    from composer3d.testing import run_ranks

    print(json.dumps({"rank": run_ranks(serve, 1, init=False)[0], "parent": []}))


def serve():
    """Serve the store as the first rank does where its launcher has none."""
    from datetime import timedelta

    from composer3d.processes.rendezvous import meeting_point

    with socket.create_server((SERVED, 0)) as probe:
        os.environ |= {"MASTER_ADDR": SERVED, "MASTER_PORT": str(probe.getsockname()[1])}
    store = meeting_point(timedelta(seconds=60))["store"]
    store.set("key", "value")
    return listening()


def case_plain(output):
    step()


def case_torchrun(output):
    script = [str(Path(__file__)), str(output), "rank"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with limit_ranks(2):
        subprocess.run([*torchrun, *script], check=True)


def case_rank(output):
    rank_main(step, output=output)


if __name__ == "__main__":
    if "rank" not in sys.argv:
        move_hostname()
    for case in sys.argv[2:]:
        print(f"== {case}", flush=True)
        globals()[f"case_{case}"](Path(sys.argv[1]))
