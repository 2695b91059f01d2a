from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from composer3d.errors import CheckpointError
from composer3d.processes.machine_errors import machine_error

OUTPUT = Path("runs/a")


def system(number, path=None):
    return OSError(number, os.strerror(number), path)


def chained(first, then):
    try:
        try:
            raise first
        except OSError as error:
            raise then from error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (system(errno.EROFS, "runs/a/metrics.jsonl"), "runs/a/metrics.jsonl cannot be written to ("),
        (system(errno.EACCES, "runs/a/checkpoints/step-1.tmp"), "runs/a/checkpoints/step-1.tmp cannot be written to ("),
        (system(errno.ENOENT, "runs/a/metrics.jsonl"), "runs/a/metrics.jsonl is gone: it was deleted, or moved"),
        (system(errno.ESTALE, "runs/a/metrics.jsonl"), "the disk of runs/a/metrics.jsonl failed ("),
        (system(errno.ENFILE), "this machine has too many files open ("),
        (system(errno.EDQUOT, "elsewhere"), "the disk of elsewhere is full: "),
        (
            chained(system(errno.EROFS, "runs/a/x"), ValueError("unexpected pos 64 vs 0")),
            "runs/a/x cannot be written to (",
        ),
        (
            CheckpointError(
                "runs/a/checkpoints/step-1: rank 0: PermissionError: [Errno 13] Permission denied: 'runs/a/c'"
            ),
            "runs/a/c cannot be written to (CheckpointError: ",
        ),
        (RuntimeError("Too many open files. Communication with the workers"), "this process may have no more than "),
    ],
)
def test_the_machine_is_to_blame(error, said):
    found = machine_error(error, OUTPUT)
    assert str(found).startswith(said) and str(found).endswith(")"), found
    assert "start the same command again" in found.advice


@pytest.mark.parametrize(
    "error",
    [
        system(errno.ENOENT, "data/corpus.txt"),
        system(errno.EACCES, "/etc/shadow"),
        OSError("row 3 is unreadable"),
        ValueError("no space"),
        CheckpointError("runs/a/checkpoints/step-1: there is no checkpoint here"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    ],
)
def test_somebody_else_is_to_blame(error):
    assert machine_error(error, OUTPUT) is None
