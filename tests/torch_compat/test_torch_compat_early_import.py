"""The files of torch's library, which are private, and its import while a thread loads them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from composer3d import torch_compat
from composer3d.torch_compat import early_import

# What a process of its own says: whether torch's operators were in its memory before torch was imported.
_TOLD = """
import sys, threading
from pathlib import Path
from composer3d.torch_compat import import_torch

seen = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":
            seen.append("sympy" in sys.modules and "libtorch_cpu" in Path("/proc/self/maps").read_text())

assert "torch" not in sys.modules
before = threading.active_count()
{prepare}
sys.meta_path.insert(0, Finder())
import_torch()
import_torch()
print(*seen, threading.active_count() - before, sys.modules["torch"].ones(2).sum().item())
"""


def told(prepare=""):
    text = _TOLD.format(prepare=prepare)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("prepare", "is_early"),
    [
        pytest.param("import os; os.sched_getaffinity = lambda pid: {0, 1}", True, id="two cores"),
        pytest.param("import os; os.sched_getaffinity = lambda pid: {0}", False, id="one core"),
        pytest.param(
            "from composer3d.torch_compat import early_import; early_import._LIBRARIES = (('libnone.so', 2),)",
            False,
            id="other files",
        ),
        pytest.param(
            "from composer3d.torch_compat import early_import; early_import._library_folder = lambda: Path('nowhere')",
            False,
            id="files that are no library",
        ),
    ],
)
def test_torch_s_library_is_loaded_while_sympy_is_imported_and_no_thread_is_left(prepare, is_early):
    assert told(prepare) == [str(is_early), "0", "2.0"]


def test_the_library_has_the_files_that_are_loaded():
    assert early_import._library_folder() is not None


def test_where_torch_is_imported_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(early_import, "_load", lambda folder: pytest.fail("a library was loaded again"))
    torch_compat.import_torch()
    assert sys.modules["torch"] is torch
