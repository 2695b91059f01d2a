"""Another user of the machine, whose files and processes are not this one's."""

from __future__ import annotations

import os

import pytest

NOBODY = 65534
OTHERS = pytest.mark.skipif(os.getuid() != 0, reason="needs to act as another user")


def as_nobody(function):
    """Run a function as another user."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
