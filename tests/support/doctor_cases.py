"""Runs with a fault, each in a folder of its own, and doctor's diagnosis of them."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import support
from composer3d.cli import main
from composer3d.processes.forking import limit_ranks

BASE = """\
composer3d = 1
[run]
device = "cpu"
output = "out"
[mesh]
dp_shard = 2
[model]
use = "faulty_run:Model"
args = { fault = "FAULT" }
[data]
use = "faulty_run:Rows"
seq_len = 8
[train]
steps = STEPS
global_batch = 2
[sharding.fsdp2]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    shutil.copy(Path(support.__file__).with_name("faulty_run.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("faulty_run", None)


def write(fault="", steps=6, more=""):
    """Write a manifest whose model has a fault."""
    text = BASE.replace("FAULT", fault).replace("STEPS", str(steps))
    Path("run.toml").write_text(text + more)


def start(*overrides):
    """Return the arguments of a run."""
    return ["run", "run.toml", *(option for text in overrides for option in ("--set", text))]


@pytest.fixture
def run(folder, capfd):
    """Run a manifest with a fault to its end; return doctor's lines, and its JSON report."""

    def told(fault, *overrides, code=3, **options):
        write(fault, **options)
        with limit_ranks(2):
            assert main(start(*overrides)) == code, capfd.readouterr().err
        return lines(capfd)

    return told


def lines(capfd, *options):
    """Return doctor's lines, and its JSON report, which must agree."""
    capfd.readouterr()
    assert main(["doctor", "out", *options]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert main(["doctor", "out", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found.keys() == {"composer3d", "kind", "rank", "first", "others", "advice"}
    expected = [found["first"], *(f"  {text}" for text in found["others"]), *(f"try: {a}" for a in found["advice"])]
    assert options or timeless(shown) == timeless(expected)
    return shown, found


def timeless(rows):
    return [re.sub(r"for \d+ s", "for N s", row) for row in rows]


def in_child(function):
    """Run a function in a forked child; return what it returns as the child's exit code."""
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # as composer3d's own forks do: see `composer3d.processes.forking.fork`
        code = 99
        try:
            code = function() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def mount(folder, size, *, options=""):
    """Put a small disk into a folder, for this process and its children alone; it goes when they go.

    Options are those of tmpfs, each after a comma.
    """
    user, group, new_mounts, new_user = os.getuid(), os.getgid(), 0x00020000, 0x10000000
    if ctypes.CDLL(None, use_errno=True).unshare(new_mounts | new_user) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "disk", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def may_mount():
    """Return whether `mount` works here."""
    if sys.platform != "linux" or shutil.which("mount") is None:
        return False
    return in_child(lambda: _quietly(lambda: mount("/mnt", "16k"))) == 0


def _quietly(function):
    try:
        function()
    except (OSError, subprocess.CalledProcessError):
        return 1
