from __future__ import annotations

import pytest

from composer3d.cli import main


@pytest.fixture
def command(capsys):
    """Run one command in this process; return its exit code, standard output and standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run
