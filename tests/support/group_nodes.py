"""Groups of ranks on several machines, each a process tree of this one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from composer3d.errors import ComposerError
from composer3d.processes.child import Child, ChildError
from composer3d.replicas import TOKEN, ReplicaPolicy
from composer3d.runner.launching.group_launcher import launch_groups
from composer3d.runner.launching.node_place import NodePlace
from support.process_trees import send_to_tree
from support.replica_groups import rows, trained

SECRET = secrets.token_hex(16)
FINGERPRINT = {"composer3d": "1", "manifest": "a" * 64}
HOST = "127.0.0.2"


def free_endpoint(host=HOST):
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


class Nodes:
    """Machines of one run: started one by one, each in a process of its own.

    Args:
        folder: Of the run, and of what ranks note.
        count: Number of machines.
        groups: Of all of them.
        text: Of the manifest.
        ends: Of ranks; see `support.replica_groups.trained`.
        ranks: Per group.
        function: Instead of training; takes the manifest, the folder and the ends.
        endpoint: Of node 0, if not a free one.
        servers: Number of machines that may serve.
        max_restarts: Of all groups, after all were lost.
    """

    def __init__(
        self,
        folder,
        *,
        count=2,
        groups=2,
        text="",
        ends=(),
        ranks=1,
        function=trained,
        endpoint=None,
        max_restarts=0,
        servers=1,
        **policy,
    ):
        folder.mkdir()
        self.folder, self.count, self.groups, self.ranks, self.function = folder, count, groups, ranks, function
        free = ",".join(free_endpoint(f"127.0.0.{2 + server}") for server in range(servers))
        self.policy, self.endpoint = {"silent_s": 60.0} | policy, endpoint or free
        self.max_restarts = max_restarts
        manifest = folder / "run.toml"
        table = "\n".join(f"{name} = {value}" for name, value in self.policy.items())
        manifest.write_text(f"composer3d = 1\n[mesh]\nreplica = {groups}\n{text}\n[communication.replicas]\n{table}\n")
        self.work = (str(manifest), str(folder), [list(each) for each in ends])

    def start(
        self, rank, *, output="run", token=SECRET, fingerprint=FINGERPRINT, count=None, endpoint=None, before=None
    ):
        """Start a machine; `before` is called in its process."""

        def launch():
            os.environ[TOKEN] = token
            if endpoint is None:
                (self.folder / f"node-{rank}.pid").write_text(str(os.getpid()))
            if before is not None:
                before()
            place = NodePlace(count=count or self.count, rank=rank, endpoint=endpoint or self.endpoint)
            options = {"policy": ReplicaPolicy(**self.policy), "num_groups": self.groups, "num_ranks": self.ranks}
            options |= {"device": "cpu", "output": self.folder / output, "place": place, "fingerprint": fingerprint}
            options["max_restarts"] = self.max_restarts
            result = launch_groups(self.function, self.work, **options)
            failed = None if result.report is None else result.report.render(self.folder / output)
            found = {"outcome": result.outcome, "failed": failed, "restarts": result.num_restarts}
            return found | {"code": result.exit_code}

        return Child(launch)

    def rows(self):
        return [rows(self.folder, group) for group in range(self.groups)]


def ending(child):
    """Return how a machine ended: its result, the text of a refusal, or None where it was killed."""
    try:
        return child.result()
    except ChildError as error:
        assert "was killed by SIGKILL" in str(error), error
        return None
    except ComposerError as error:
        return str(error)


def waiting(manifest, folder, ends):
    """Run as a rank that waits until the test lets it end."""
    file = Path(folder, "release")
    Path(folder, f"there-{os.environ['COMPOSER3D_REPLICA']}").touch()
    while not file.exists():
        time.sleep(0.01)


def await_file(path, *, limit_s=120.0):
    """Wait for a file that another process writes."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.01)


def await_text(path, text, *, limit_s=120.0):
    """Wait for a line that another process writes into a file that is there."""
    deadline = time.monotonic() + limit_s
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} has no {text!r}"
        time.sleep(0.01)


class _Continues(logging.Handler):
    """Lets a machine that was stopped go on once it was given up."""

    def __init__(self, folder, rank):
        super().__init__()
        self.file, self.rank = folder / f"node-{rank}.pid", rank

    def emit(self, record):
        if record.getMessage().startswith(f"node {self.rank} ") and "is lost" in record.getMessage():
            send_to_tree(int(self.file.read_text()), signal.SIGCONT)


def continuing(folder, rank):
    """Return what, in node 0, lets another machine go on once it was given up."""
    return lambda: logging.getLogger("composer3d").addHandler(_Continues(folder, rank))


def noting(file):
    """Return what has a machine write its warnings into a file."""

    def add():
        handler = logging.FileHandler(file)
        handler.setLevel(logging.WARNING)
        logging.getLogger("composer3d").addHandler(handler)

    return add


def read_only(folder, log):
    """Return what makes a folder read-only for a machine alone, and has it note its warnings."""

    def mount():
        noting(log)()
        libc = ctypes.CDLL(None, use_errno=True)
        bind, remount, private = 0x1000, 0x1000 | 0x20 | 0x1, 0x40000 | 0x4000
        place = os.fsencode(folder)
        done = libc.unshare(0x20000) or libc.mount(None, b"/", None, private, None)  # of mounts, from those of others
        if done or libc.mount(place, place, None, bind, None) or libc.mount(place, place, None, remount, None):
            log.write_text("no mounts")

    return mount


@contextlib.contextmanager
def linked_networks(num_nodes=2):
    """Give functions that take a process into networks of their own, connected by a link; None where that is refused.

    The first one's address is 10.203.0.1, and so on.
    """
    tag = f"c3d{os.getpid()}"
    names = [f"{tag}-{rank}" for rank in range(num_nodes)]
    try:
        _ip("link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b")
        for rank, (name, device) in enumerate(zip(names, (f"{tag}a", f"{tag}b"), strict=True)):
            _ip("netns", "add", name)
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"10.203.0.{rank + 1}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [functools.partial(_enter, name) for name in names]
    except (OSError, subprocess.CalledProcessError):
        yield None
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", f"{tag}a"], capture_output=True)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(name):
    with Path(f"/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")
