"""A real Slurm cluster of two nodes on this machine: ranks join by srun, a job ends, is queued again and goes on."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import composer3d

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
MANIFEST = """\
composer3d = 1
extends = "quickstart"
run.output = "out"
train.steps = 40
model.args.dim = 32
model.args.num_layers = 2
checkpoint.every = 1000
"""
LIMIT_S = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(shutil.which(program) for program in PROGRAMS),
        reason="needs root and Debian's slurm-wlm and munge, for a cluster of its own",
    ),
]


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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Daemons of a cluster of two nodes; the environment of its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    port, first, second = free_ports(3)
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, port=port, folder=folder, first=first, second=second)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in (("socket", "socket"), ("pid-file", "pid"))]
    munge += [f"--{name}={folder}/munge.{name}" for name in ("log-file", "seed-file")]
    daemons = [
        subprocess.Popen(["munged", "--foreground", "--force", f"--key-file={key}", *munge], env=environment),
        subprocess.Popen(["slurmctld", "-D"], env=environment),
    ]
    for node in ("n1", "n2"):
        (folder / f"spool-{node}").mkdir()
        daemons.append(subprocess.Popen(["slurmd", "-D", "-N", node], env=environment))
    try:
        until(lambda: said(environment, "sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "two nodes are idle")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=1200)


def said(environment, *command, cwd=None):
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False).stdout.strip()


def steps(folder):
    """Return the steps of a run's metrics."""
    file = folder / "out" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("more", [[], ["--mpi=pmi2"]], ids=["plain", "pmi2"])
def test_tasks_of_srun_are_one_world(more, cluster, tmp_path):
    (tmp_path / "run.toml").write_text(MANIFEST.replace("40", "2"))
    command = [sys.executable, "-m", "composer3d", "run", "run.toml"]
    out = said(cluster, "srun", "-N2", "--ntasks-per-node=1", *more, *command, cwd=tmp_path)
    assert out.count("finished: 2 steps") == 1
    assert steps(tmp_path) == [1, 2]


def test_a_job_that_is_told_of_its_end_saves_and_goes_on(cluster, tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_CONF", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, cluster[name])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    job = composer3d.launch("run.toml", on="slurm", nodes=2, gpus_per_node=1)
    number = job.submit().split()[-1]
    until(lambda: len(steps(tmp_path)) >= 3, "three steps are made")
    said(cluster, "scancel", "--signal=USR1", "--batch", number)
    until(lambda: said(cluster, "squeue", "-h", "-j", number, "-o", "%r") == "BeginTime", "the job is queued again")
    saved = [int(path.name.removeprefix("step-")) for path in (tmp_path / "out" / "checkpoints").glob("step-*")]
    assert saved  # before its interval of 1000 steps
    assert max(saved) < 40
    until(lambda: not said(cluster, "squeue", "-h", "-j", number), "the job has ended")
    assert steps(tmp_path) == list(range(1, 41))
    logs = sorted(path.name for path in (tmp_path / "out" / "logs").glob("*.log"))
    assert logs == [f"slurm-{number}-{restart}-{node}.log" for restart in (0, 1) for node in (0, 1)]
