"""The benchmarks of one GPU where there is none: what they skip, that both loops train, that plans and runs meet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*arguments, script="gpu.py"):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, timeout=1200, check=False
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and nothing is skipped")
def test_every_plan_is_told_as_skipped_without_a_gpu():
    rows = json.loads(run("--json", script="gpu_plan.py"))["rows"]
    assert len(rows) == 11
    assert {row["skipped"] for row in rows} == {"skipped: there is no CUDA device"}


@pytest.mark.slow
def test_a_plan_meets_its_run():
    (row,) = json.loads(run("--tiny", "--cases", "mixture", "--steps", "2", "--json", script="gpu_plan.py"))["rows"]
    assert row["planned_peak_gib"] > 0 and row["planned_step_s"] > 0
    assert row["step_error"] == pytest.approx(row["planned_step_s"] / row["step_s"] - 1, abs=0.01)
