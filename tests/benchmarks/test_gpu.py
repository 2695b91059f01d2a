"""benchmarks/gpu.py where there is no GPU: what it skips, and that both of its loops train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def run(*arguments):
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and nothing is skipped")
def test_every_cell_is_told_as_skipped_without_a_gpu():
    rows = json.loads(run("--json"))["rows"]
    assert len(rows) == 2 * 5
    assert {row["skipped"] for row in rows} == {"there is no CUDA device"}


@pytest.mark.slow
def test_both_loops_train_in_float8():
    arguments = ("--shapes", "1b", "--cells", "rowwise_compile", "--steps", "4", "--tiny")
    first, last = (json.loads(run("--worker", author, *arguments)) for author in ("hand", "composer3d"))
    assert first["flops_per_token"] == last["flops_per_token"] > 0
    # They draw other weights of the same spread: the loss of both is that of even odds over 64 tokens.
    assert first["step_s"] > 0 and last["step_s"] > 0
    assert first["loss"] == pytest.approx(last["loss"], abs=0.1)
    assert 3.9 < last["loss"] < 4.4


def test_what_is_not_begun_in_time_is_told():
    (row,) = json.loads(run("--shapes", "1b", "--cells", "bf16", "--tiny", "--limit-s", "0", "--json"))["rows"]
    assert row == {"shape": "1b", "cell": "bf16", "skipped": "0 s were over"}
