"""Loops of others, beside themselves on one device: the same losses, in as few lines as each example says."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import composer3d
from composer3d.testing import run_ranks

EXAMPLES = Path(composer3d.__file__).parent / "examples"
LAYOUTS = {"fsdp2": None, "ddp": "[sharding.ddp]\n", "tp": "mesh.tp = 2\n[sharding.tensor_parallel]\n"}

# Of each loop: the calls of its main, one after another, as processes of their own would make them.
CALLS = {"nanogpt": [{"max_iters": 5}, {"max_iters": 10}], "no-trainer": [{}], "recipe": [{}]}


def losses(name, folder, manifest):
    """Run the loop of one device and the composed one on this rank; return the losses of both."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES / name))
    rank, found = torch.distributed.get_rank(), []
    for program, out in (("one_device", folder / f"alone-{rank}"), ("train", folder / "together")):
        out.mkdir(exist_ok=True)
        module = importlib.import_module(program)
        if manifest is not None and program == "train":
            (out / f"run-{rank}.toml").write_text(f"composer3d = 1\n{manifest}")
            module.__file__ = str(EXAMPLES / name / "train.py")
            module.MANIFEST = out / f"run-{rank}.toml"
        for call in CALLS[name]:
            torch.manual_seed(0)
            result = module.main(str(out), **call)
        found.append(result)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_losses_are_those_of_one_device(name, tmp_path):
    for alone, together in run_ranks(losses, 2, name, tmp_path, None):
        assert len(alone) == len(together) > 1
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-12
        assert len(set(alone)) > 1


@pytest.mark.parametrize("name", CALLS)
def test_as_many_lines_change_as_it_says(name):
    before, after = ((EXAMPLES / name / f"{each}.py").read_text().splitlines() for each in ("one_device", "train"))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    stated = re.search(r"(\d+) lines are changed or added", (EXAMPLES / name / "run.toml").read_text().replace("\n# ", " "))
    assert int(stated[1]) == len(changed), changed
