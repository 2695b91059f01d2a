"""Temporary folders: what a killed process left goes with the next start, and what is held or another's stays."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import pytest

from composer3d.processes.temporary_folder import remove_if_abandoned, temporary_folder

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(kind):
    """Return the folder of a process that was killed in it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with temporary_folder(kind) as folder:
            (folder / "file").write_text("something")
            os.write(writer, str(folder).encode())
            signal.pause()
    os.close(writer)
    name = os.read(reader, 4096).decode()
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return name


def test_it_is_private_and_goes_afterwards(temporary):
    with pytest.raises(ValueError), temporary_folder("world") as folder:
        (folder / "inner").mkdir()
        assert (folder.parent, folder.stat().st_mode & 0o777) == (temporary, 0o700)
        raise ValueError
    assert [*temporary.iterdir()] == []


def test_what_a_killed_process_left_goes_with_the_next_start(temporary):
    left = killed("world")
    assert [str(path) for path in temporary.iterdir()] == [left]
    with temporary_folder("proof") as folder:
        assert [*temporary.iterdir()] == [folder]


def test_what_a_killed_launch_left_is_kept_for_a_day(temporary):
    left = killed("launch")
    with temporary_folder("launch"):
        assert os.path.exists(left)
    yesterday = time.time() - DAY_S - 1
    os.utime(left, (yesterday, yesterday))
    with temporary_folder("launch"):
        assert not os.path.exists(left)


def test_what_is_held_stays_also_while_only_a_child_holds_it():
    with temporary_folder("world") as folder:
        with temporary_folder("world"):
            assert folder.exists()
        pid = os.fork()
        if pid == 0:
            with temporary_folder("world"):  # the child's own, and the parent's is not the child's to remove
                os._exit(0 if folder.exists() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert folder.exists()


def test_a_forked_child_that_unwinds_removes_nothing_of_its_parent():
    reader, writer = os.pipe()
    with temporary_folder("world") as folder:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
    if pid == 0:
        os.write(writer, b"there" if folder.exists() else b"gone")
        os._exit(0)
    assert os.read(reader, 9) == b"there" and not folder.exists()


@pytest.mark.parametrize(
    "name", ["composer3d-ranks-10000001", "composer3d-world.short", "precious", "x/composer3d-a.12345678"]
)
def test_other_folders_stay(temporary, name):
    other = temporary / name
    other.mkdir(parents=True)
    remove_if_abandoned(other)
    with temporary_folder("world"):
        assert other.is_dir()


def test_links_are_not_followed(temporary, tmp_path_factory):
    precious = tmp_path_factory.mktemp("precious")
    (temporary / "composer3d-world.a1b2c3d4").symlink_to(precious)
    with temporary_folder("world"):
        assert precious.is_dir() and len([*temporary.iterdir()]) == 2
