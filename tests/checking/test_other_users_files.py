"""Folders of other users: what this one may not read or write is said to be that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.other_users import OTHERS, as_nobody

from composer3d.checking.sizes import output_problems
from composer3d.errors import DataError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.data.paths import locate


@pytest.fixture
def open_to_all(tmp_path):
    """A folder that every user may list."""
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.getuid() and above != Path(above.root):
            above.chmod(above.stat().st_mode | 0o055)
    return tmp_path


@OTHERS
def test_a_folder_that_may_not_be_read_is_not_called_empty(open_to_all):
    (open_to_all / "corpus").mkdir(mode=0o700)
    (open_to_all / "corpus" / "a.txt").write_text("text")

    def look():
        with pytest.raises(DataError, match='"corpus" cannot be listed: .*Permission denied'):
            locate("corpus", folder=open_to_all)

    as_nobody(look)


@OTHERS
def test_an_output_that_is_another_users_is_not_called_read_only(open_to_all):
    (open_to_all / "out").mkdir(mode=0o755)
    path = open_to_all / "run.toml"
    path.write_text(f"""composer3d = 1
model = "composer3d.models:llama"
run.output = "{open_to_all}/out"
train.steps = 1
""")
    manifest = load_manifest(path, tables=TABLES)

    def look():
        (problem,) = output_problems(manifest)
        assert problem.message.endswith(f"cannot be written: this user may not write into {open_to_all}/out")

    as_nobody(look)
