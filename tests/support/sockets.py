"""Which sockets of a process listen, and a machine whose own name is no loopback interface's first address."""

import contextlib
import ctypes
import os
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

from support.process_trees import tree_of

ELSEWHERE = "127.0.1.5"


def listening(pid="self", *, but=()):
    """Return the addresses on which a process listens, but for sockets of some ports."""
    return sorted({_address(digits, family) for digits, port, family in _listeners(pid) if int(port, 16) not in but})


def listening_ports(pid="self"):
    """Return the TCP ports on which a process listens; none of one that has ended."""
    try:
        return {int(port, 16) for _, port, _ in _listeners(pid)}
    except (FileNotFoundError, ProcessLookupError):
        return set()


@contextlib.contextmanager
def watched_listeners():
    """Give the set of addresses on which this process and all that it starts are seen to listen."""
    found, over = set(), threading.Event()

    def look():
        while not over.wait(0.02):
            for pid in tree_of(os.getpid()):
                with contextlib.suppress(OSError):  # it has ended
                    found.update(listening(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _listeners(pid):
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[len("socket:[") : -1])
    for kind, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield (*fields[1].split(":"), family)


def _address(digits, family):
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return socket.inet_ntop(family, b"".join(words))


def move_hostname():
    """Let this machine's name mean another address than loopback's first, for this process and its children."""
    user, group, new_mounts, new_user = os.getuid(), os.getgid(), 0x00020000, 0x10000000
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts | new_user) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    with tempfile.NamedTemporaryFile("w") as hosts:
        hosts.write(f"{ELSEWHERE} {socket.gethostname()}\n127.0.0.1 localhost\n")
        hosts.flush()
        subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True, capture_output=True)
    assert socket.gethostbyname(socket.gethostname()) == ELSEWHERE
