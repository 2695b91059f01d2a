"""One run at a time in a folder: who holds it, who is refused, and when it is free again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from composer3d.errors import LockError
from composer3d.runner.launching import lock as locks
from composer3d.runner.launching.lock import RunLock, attempts_of, refuse_held

HOST = re.escape(socket.gethostname())
TIME = r"\d{4}-\d\d-\d\dT[\d:]+\+00:00"


def held(folder, then=None, **options):
    """Hold a folder in a child of this process; return its pid once it does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            lock = RunLock(folder, **options)
            if then is not None:
                then(lock)
            os.write(writer, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    return pid


def end(pid, number=signal.SIGKILL):
    os.kill(pid, number)
    os.waitpid(pid, 0)


def refused(folder):
    with pytest.raises(LockError) as caught:
        RunLock(folder)
    return str(caught.value)


def test_a_second_run_is_refused_with_both_names_and_changes_nothing(tmp_path):
    pid = held(tmp_path / "out")
    try:
        before = (tmp_path / "out" / ".lock").read_bytes()
        pattern = (
            rf"{tmp_path}/out: another run is in this folder: pid {pid} on {HOST}, since {TIME}; wait for it, or stop "
            rf"it: kill {pid} saves and ends it. This one \(pid {os.getpid()} on {HOST}\) has changed nothing; another "
            r"run.output lets it start beside the other"
        )
        assert re.fullmatch(pattern, refused(tmp_path / "out"))
        assert (tmp_path / "out" / ".lock").read_bytes() == before
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    finally:
        end(pid)


def test_a_held_folder_is_seen_without_a_change_and_a_free_one_is_left_alone(tmp_path):
    refuse_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    pid = held(tmp_path)
    before = (tmp_path / ".lock").read_bytes()
    with pytest.raises(LockError, match=f"another run is in this folder: pid {pid} "):
        refuse_held(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == before
    end(pid)
    refuse_held(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_any_death_releases_it(tmp_path, number):
    end(held(tmp_path), number)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def kill(pid):
    """Kill a process that is no child of this one, and wait for its end."""
    end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([end], [], [])
    os.close(end)


def test_a_rank_keeps_it_after_its_launcher_and_its_own_workers_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_DYING_S", 0.2)
    reader, writer = os.pipe()

    def rank(lock):
        if os.fork() == 0:
            lock.leave_children_out()
            if os.fork() == 0:
                signal.pause()  # a worker
            os.write(writer, str(os.getpid()).encode() + b" " + str(_child_of_this()).encode())
            signal.pause()

    launcher = held(tmp_path, rank)
    rank_pid, worker = map(int, os.read(reader, 100).split())
    try:
        end(launcher)
        assert f"its launcher (pid {launcher} on {socket.gethostname()}) is gone, and ranks of it" in refused(tmp_path)
        kill(rank_pid)
        RunLock(tmp_path).release()
        os.kill(worker, 0)  # it lives, and does not count
    finally:
        os.kill(worker, signal.SIGKILL)


SPAWNING = """
import multiprocessing, os, signal, sys
from pathlib import Path
from composer3d.runner.launching.lock import RunLock

def rank(lock):
    lock.leave_children_out()
    worker = os.fork()
    if worker == 0:
        signal.pause()
    os.write(1, f"{os.getpid()} {worker}\\n".encode())
    signal.pause()

if __name__ == "__main__":
    lock = RunLock(Path(sys.argv[1]))
    process = multiprocessing.get_context("spawn").Process(target=rank, args=(lock,))
    process.start()
    signal.pause()
"""


def test_a_spawned_rank_keeps_it_as_a_forked_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_DYING_S", 0.2)
    script, folder = tmp_path / "spawning.py", tmp_path / "out"
    script.write_text(SPAWNING)
    launcher = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True)
    rank, worker = map(int, launcher.stdout.readline().split())
    try:
        assert f"pid {launcher.pid} on" in refused(folder)
        launcher.kill()
        launcher.wait()
        assert f"its launcher (pid {launcher.pid} on {socket.gethostname()}) is gone, and ranks of it" in refused(
            folder
        )
        kill(rank)
        RunLock(folder).release()
        os.kill(worker, 0)  # it lives, and does not count
    finally:
        os.kill(worker, signal.SIGKILL)
        launcher.stdout.close()


LAUNCHING = """
import os, signal, sys
from pathlib import Path
from composer3d.runner.launching.launcher import launch_local

def rank():
    held = [os.path.basename(os.readlink(f"/proc/self/fd/{number}")) for number in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{number}")]
    os.write(1, f"{held.count('.lock')} {os.getpid()}\\n".encode())
    signal.pause()

if __name__ == "__main__":
    output = Path(sys.argv[1])
    launch_local(rank, num_ranks=2, device="cuda", output=output, exclusive=True)
"""


def test_ranks_on_gpus_hold_the_folder_too_and_end_with_their_launcher(tmp_path):
    """Ranks on CUDA devices are spawned; these use none."""
    script, folder = tmp_path / "launching.py", tmp_path / "out"
    script.write_text(LAUNCHING)
    launcher = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True)
    with launcher:
        ranks = [tuple(map(int, launcher.stdout.readline().split())) for _ in range(2)]
        assert [held for held, _ in ranks] == [1, 1]
        launcher.kill()
        launcher.stdout.read()  # until the last rank is gone
    RunLock(folder).release()


def test_nobody_else_can_be_handed_it(tmp_path):
    with RunLock(tmp_path) as lock, pytest.raises(RuntimeError, match="should only be shared between processes"):
        pickle.dumps(lock)


def _child_of_this():
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return int(children.read().split()[0])


def test_a_run_whose_predecessor_is_just_dying_waits_for_it(tmp_path):
    # The one that holds it is named as gone, as a launcher is whose ranks the kernel ends.
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    os.write(descriptor, json.dumps({"pid": ended, "host": socket.gethostname()}).encode())
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
    os.close(descriptor)
    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    os.wait()


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        pass
    assert caplog.messages == [
        f"{tmp_path}: this disk has no locks (No locks available): a second run in this folder would not be noticed"
    ]


def test_where_ranks_leave_their_files_is_found_through_it(tmp_path):
    assert attempts_of(tmp_path) == tmp_path / "ranks"
    with RunLock(tmp_path, attempts=tmp_path / "elsewhere"):
        assert attempts_of(tmp_path) == tmp_path / "elsewhere"


@pytest.mark.parametrize(("name", "is_left"), [("composer3d-launch.a1b2c3d4", False), ("precious", True)])
def test_what_a_killed_launcher_left_is_removed_and_nothing_else(tmp_path, monkeypatch, name, is_left):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / name
    left.mkdir()
    end(held(tmp_path / "out", attempts=left))
    RunLock(tmp_path / "out").release()
    assert left.exists() == is_left


def planted(folder, name, owner):
    link = folder / name
    link.symlink_to(folder.parent / "elsewhere")
    os.lchown(link, owner, owner)
    return (
        f"{link}: is a symbolic link of user {owner}, and a run would write through it; remove it, and let nobody else "
        f"write to {folder}"
    )


@pytest.mark.parametrize("name", [".lock", "accounts", "checkpoints", "metrics.jsonl"])
def test_links_of_other_users_are_refused(tmp_path, name):
    if os.getuid() != 0:
        pytest.skip("needs root, which alone may give a link to another user")
    (tmp_path / "out").mkdir()
    text = planted(tmp_path / "out", name, 65534)
    assert refused(tmp_path / "out") == text
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_in_the_place_of_the_lock_is_refused_whoever_owns_it(tmp_path):
    (tmp_path / "out").mkdir()
    text = planted(tmp_path / "out", ".lock", os.getuid())
    assert refused(tmp_path / "out") == text


@pytest.mark.parametrize("name", ["manifest.toml", "environment.json"])
def test_a_link_of_ones_own_in_the_place_of_a_file_that_is_replaced_is_refused(tmp_path, name):
    (tmp_path / "own.toml").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "own.toml")
    assert refused(tmp_path / "out") == (
        f"{tmp_path}/out/{name}: is a symbolic link, and a run writes its own file there; move it away, or set another "
        "run.output"
    )
    assert (tmp_path / "own.toml").read_text() == "mine"


@pytest.mark.parametrize("name", ["manifest.toml", "metrics.jsonl", "error.json", ".lock"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_in_the_place_of_one_is_refused(tmp_path, name, make):
    make(tmp_path / name)
    assert refused(tmp_path) == (
        f"{tmp_path}/{name}: is no file, and a run keeps a file of its own there; move it away, or set another "
        "run.output"
    )


def test_checkpoints_may_be_a_link_to_a_folder_and_no_file(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "disk")
    RunLock(tmp_path / "out").release()
    (tmp_path / "disk").rmdir()
    assert refused(tmp_path / "out").startswith(f"{tmp_path}/out/checkpoints: is no folder, and a run keeps a folder")
