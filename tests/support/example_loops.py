"""Loops of others that ship as examples, beside themselves on one device."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import composer3d
from composer3d.testing import run_ranks

EXAMPLES = Path(composer3d.__file__).parent / "examples"
TIGHT = 1e-12


def losses(name, folder, calls, before):
    """Run the loop as it was and the composed one on this rank; return the losses of both."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES / name))
    rank, found = torch.distributed.get_rank(), []
    for program, out in ((before, folder / f"before-{rank}"), ("train", folder / "together")):
        out.mkdir(exist_ok=True)
        module = importlib.import_module(program)
        for call in calls:  # each as a process of its own would make it
            result = module.main(str(out), **call)
        found.append(result)
    return found


def assert_losses_are_alike(
    name: str,
    folder: Path,
    *,
    calls: Sequence[Mapping[str, Any]] = ({},),
    num_ranks: int = 2,
    before: str = "one_device",
) -> None:
    """Compare what `main` returns on every rank with that of the loop before it was composed."""
    for alone, together in run_ranks(losses, num_ranks, name, folder, calls, before):
        assert len(alone) == len(together) and len(set(alone)) > 1
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < TIGHT


def as_torchrun() -> None:
    """Set torchrun's environment, which trainers read, for the group that exists; without one, none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ.update(zip(names, map(str, (rank, rank, size, size, 0, 1)), strict=True))
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    else:
        for name in names:
            os.environ.pop(name, None)


def run_program(name, program, folder, batch_size):
    """Run one program of an example with a trainer of its own; return its losses."""
    torch.set_default_dtype(torch.float64)
    if program == "one_device":
        torch.distributed.destroy_process_group()
    as_torchrun()
    # Lightning says so on every machine that has Slurm.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    sys.path.insert(0, str(EXAMPLES / name))
    return importlib.import_module(program).main(str(folder / program), batch_size=batch_size)


def assert_trainers_are_alike(name: str, folder: Path, *, batch_size: int, at_most: float = TIGHT) -> None:
    """Compare a program with a trainer on one device with itself on two ranks, each with half of the batch."""
    (alone,) = run_ranks(run_program, 1, name, "one_device", folder, batch_size)
    for together in run_ranks(run_program, 2, name, "train", folder, batch_size // 2):
        assert len(alone) == len(together) and len(set(alone)) > 1
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < at_most


def assert_as_many_lines_change_as_it_says(name: str, *, before: str = "one_device") -> None:
    """Compare the number of lines, empty ones left out, that manifest and README state with those that differ."""
    old, new = ((EXAMPLES / name / f"{each}.py").read_text().splitlines() for each in (before, "train"))
    changed = [line for line in difflib.ndiff(old, new) if line.startswith("+ ") and line[2:].strip()]
    text = (EXAMPLES / name / "run.toml").read_text().replace("\n# ", " ")
    stated = re.search(r"(\d+) changed lines", text)
    assert stated is not None and int(stated[1]) == len(changed), "\n".join(changed)
    row = re.search(rf"^\| `{name}` \| (\d+) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert row is not None and int(row[1]) == len(changed)
