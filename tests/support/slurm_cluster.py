"""A real Slurm cluster of two nodes on this machine, for tests as root where Debian's slurm-wlm and munge are."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
CONFIGURATION = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
KillWait=30
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=2 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
LIMIT_S = 300

NEEDS_SLURM = pytest.mark.skipif(
    os.getuid() != 0 or not all(shutil.which(program) for program in PROGRAMS),
    reason="needs root and Debian's slurm-wlm and munge, for a cluster of its own",
)


def free_ports(number):
    """Return ports that nobody listens on, in a row."""
    first = 21000 + os.getpid() % 4000
    while True:
        try:
            for port in range(first, first + number):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
            return range(first, first + number)
        except OSError:
            first += number


def until(happened, what):
    """Wait for something, and say what did not happen."""
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


class Cluster:
    """Daemons of a cluster.

    Args:
        folder: Of its files.

    Attributes:
        environment: Of the cluster's commands.
    """

    def __init__(self, folder):
        (folder / "state").mkdir()
        port, first, second = free_ports(3)
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(host=host, port=port, folder=folder, first=first, second=second)
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        folder.chmod(0o755)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in (("socket", "socket"), ("pid-file", "pid"))]
        munge += [f"--{name}={folder}/munge.{name}" for name in ("log-file", "seed-file")]
        self.daemons = {}
        self.start("munged", "--foreground", "--force", f"--key-file={key}", *munge)
        self.start("slurmctld", "-D")
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            self.start_node(node)

    def start(self, program, *options, name=None):
        self.daemons[name or program] = subprocess.Popen([program, *options], env=self.environment)

    def start_node(self, node):
        self.start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node):
        """End a node's daemon, as the loss of the node does."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def said(self, *command, cwd=None):
        """Return what one of its commands prints."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def end(self):
        """End its jobs, whose processes its daemons do not take with them, and the daemons."""
        self.said("scancel", "--full", "--signal=KILL", "--user=root")
        self.said("scancel", "--user=root")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            daemon.wait(timeout=1200)


@contextlib.contextmanager
def running_cluster(folder):
    """Start a cluster, and end it."""
    cluster = Cluster(folder)
    try:
        until(lambda: cluster.said("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "two nodes are idle")
        yield cluster
    finally:
        cluster.end()
