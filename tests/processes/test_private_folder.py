"""Folders of this user in the temporary folder: what another user puts in their place is refused, and never written."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from support.other_users import NOBODY, OTHERS, as_nobody

from composer3d.errors import ForkError
from composer3d.processes.forking import limit_ranks
from composer3d.processes.private_folder import open_private, user_folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder as /tmp is: everybody may make files there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.getuid() and above != Path(above.root):
            above.chmod(above.stat().st_mode | 0o011)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_it_is_this_users_alone_and_the_same_again(temporary):
    folder = user_folder("composer3d-x")
    assert (folder, folder.stat().st_mode & 0o777) == (temporary / f"composer3d-x-{os.getuid()}", 0o700)
    assert user_folder("composer3d-x") == folder


@OTHERS
@pytest.mark.parametrize("name", ["composer3d-ranks", "composer3d"])
def test_another_users_link_is_not_followed(temporary, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    for file in ("queue", "place-0", "error.json"):
        (victim / file).write_text("precious")
    path = temporary / f"{name}-0"
    as_nobody(lambda: path.symlink_to(victim))
    with pytest.raises(ForkError) as caught:
        if name == "composer3d-ranks":
            with limit_ranks(1):
                pass
        else:
            user_folder(name)
    assert re.fullmatch(
        rf"{path}: is no folder of this user's \((Not a directory|Too many levels of symbolic links)\); remove it, or "
        r"set TMPDIR to a folder of your own",
        str(caught.value),
    )
    assert {file.read_text() for file in victim.iterdir()} == {"precious"}


@OTHERS
def test_another_users_folder_is_refused(temporary):
    path = temporary / "composer3d-ranks-0"
    as_nobody(path.mkdir)
    with pytest.raises(ForkError) as caught, limit_ranks(1):
        pass
    assert str(caught.value) == (
        f"{path}: belongs to user {NOBODY}, not to this one (0); remove it, or set TMPDIR to a folder of your own"
    )


def test_a_folder_that_others_may_write_to_is_refused(temporary):
    path = temporary / f"composer3d-ranks-{os.getuid()}"
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(ForkError) as caught, limit_ranks(1):
        pass
    advice = "remove it, or set TMPDIR to a folder of your own"
    assert str(caught.value) == f"{path}: other users have access (mode 770); {advice}"


def test_a_link_inside_is_not_followed_and_nothing_is_truncated(temporary, tmp_path):
    folder = user_folder("composer3d-x")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "queue").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        open_private(folder, "queue")
    assert victim.read_text() == "precious"
