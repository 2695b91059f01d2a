"""Random damage to a run's checkpoints, and what load, resume and export make of it: an error, or the same bits.

A small run saves twice on two ranks. Each round copies it, damages a file (flips, truncations, zeroed or overwritten
ranges, bytes appended or put in, files deleted, exchanged or copied over others), and then loads everything, as a
resumed run does, and exports the weights. Some rounds also resume the run by the command. Whatever is neither a
`ComposerError` nor the same bits is counted as wrong.

    python benchmarks/checkpoint_corruption.py [--rounds 400] [--resumes 8] [--seed 0] [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from harness import note, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.corruption import corrupt  # noqa: E402  # the tests' own

from composer3d.checkpoint import contents, latest, load  # noqa: E402
from composer3d.cli import main as command  # noqa: E402
from composer3d.errors import ComposerError  # noqa: E402

MODEL = "model.args={dim=32,num_layers=1,num_heads=2}"


def run(folder: Path, steps: int) -> subprocess.CompletedProcess[str]:
    """Start the run, or go on with it."""
    options = ["--set", f"train.steps={steps}", "--set", "run.output=o", "--set", "checkpoint.every=2", "--set", MODEL]
    line = [sys.executable, "-m", "composer3d", "run", "quickstart", "--nproc-per-node", "2", *options]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


def loaded(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """Return everything that a run goes on with."""
    path = latest(folder / "checkpoints")
    assert path is not None
    tensors = {key: torch.zeros(info.shape, dtype=info.dtype) for key, info in contents(path).items()}
    state = load(path, tensors=tensors)
    return state, {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}


def exported(folder: Path, to: Path) -> bytes | int:
    """Return the weights that were exported, or the exit code."""
    shutil.rmtree(to, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        code = command(["export", str(folder), "--to", str(to)])
    return (to / "model.safetensors").read_bytes() if code == 0 else code


def outcome_of(good: Any, action: Any) -> str:
    """Return whether something was refused, the same, or wrong, and how."""
    try:
        found = action()
    except ComposerError:
        return "refused"
    except BaseException as error:
        return f"wrong: {type(error).__name__}"
    return "refused" if found == 2 else "same" if found == good else "wrong: other bits"


def measure(rounds: int, resumes: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return outcomes by operation, and what was wrong."""
    done = run(folder, 4)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    good, bad, to = folder / "o", folder / "bad", folder / "out"
    whole, weights = loaded(good), exported(good, to)
    chance, wrong = random.Random(seed), []
    outcomes: dict[str, Counter[str]] = {"load": Counter(), "export": Counter(), "resume": Counter()}
    for number in range(rounds):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        what = corrupt(bad / "checkpoints", chance)
        found = {
            "load": outcome_of(whole, lambda: loaded(bad)),
            "export": outcome_of(weights, lambda: exported(bad, to)),
        }
        if number < resumes:
            (folder / f"r{number}").mkdir()
            shutil.copytree(bad, folder / f"r{number}" / "o")
            resumed = run(folder / f"r{number}", 6)
            is_raw = "Traceback (most recent call last)" in resumed.stderr
            found["resume"] = "wrong: a traceback" if is_raw else "refused" if resumed.returncode else "same"
            if found["resume"] != found["load"]:
                found["resume"] = f"wrong: {found['resume']}, and load {found['load']}"
        for operation, outcome in found.items():
            outcomes[operation][outcome.partition(":")[0]] += 1
            if outcome.startswith("wrong"):
                wrong.append(f"{operation}: {what}: {outcome}")
        if number % 50 == 49:
            note(f"{number + 1} of {rounds}")
    return {"outcomes": {operation: dict(counted) for operation, counted in outcomes.items()}, "wrong": wrong}


def main() -> None:
    """Measure, print, and write; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--resumes", type=int, default=8, help="rounds that also resume the run by the command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.rounds, arguments.resumes, arguments.seed, Path(folder))
    text = json.dumps({"rounds": arguments.rounds, "seed": arguments.seed, **result}, indent=1)
    say(text)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if result["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
