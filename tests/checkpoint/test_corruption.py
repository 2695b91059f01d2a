"""Damage of any kind to any file of a checkpoint is an error, or changes nothing that is loaded or exported."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections import Counter

import torch
from support.corruption import KINDS, corrupt
from support.daily_part import PART

from composer3d.checkpoint import contents, latest, load, save
from composer3d.cli import main
from composer3d.errors import CheckpointError

ROUNDS = 150


def tensors_of(step):
    generator = torch.Generator().manual_seed(step)
    shapes = {"model/w": (40, 30), "model/b": (30,), "optimizer/w/exp_avg": (40, 30), "optimizer/w/step": ()}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def state_of(step):
    return {"format": 1, "states": {"attached/mine": {"step": step, "text": "x" * 300}}, "lr": 0.1 / step}


def loaded(folder):
    """Return what a run goes on with."""
    path = latest(folder)
    tensors = {key: torch.zeros(info.shape, dtype=info.dtype) for key, info in contents(path).items()}
    state = load(path, tensors=tensors)
    return state, {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}


def exported(folder, to):
    """Return the bytes of an export, None where it was refused."""
    shutil.rmtree(to, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        code = main(["export", str(folder), "--to", str(to)])
    assert code in (0, 2)
    return (to / "model.safetensors").read_bytes() if code == 0 else None


def test_damage_is_refused_or_changes_nothing(tmp_path):
    good, bad = tmp_path / "good" / "checkpoints", tmp_path / "bad" / "checkpoints"
    for step in (1, 2):
        save(good / f"step-{step}", tensors=tensors_of(step), state=state_of(step))
    whole, weights = loaded(good), exported(good.parent, tmp_path / "out")
    chance, outcomes = random.Random(PART), Counter()
    for number in range(ROUNDS):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        what = corrupt(bad, chance)
        try:
            assert loaded(bad) == whole, what
            outcomes["loaded"] += 1
        except CheckpointError as error:
            assert str(bad) in str(error), what
            outcomes["refused"] += 1
        if number % 5 == 0:
            assert exported(bad.parent, tmp_path / "out") in (None, weights), what
    assert outcomes["refused"] > ROUNDS // 4 and outcomes["loaded"], outcomes  # half of the files are of the other step


def test_every_kind_of_damage_is_made(tmp_path):
    made = set()
    for seed in range(100):
        (tmp_path / "a").write_bytes(bytes(range(200)))
        (tmp_path / "b").write_bytes(bytes(300))
        made.add(corrupt(tmp_path, random.Random(seed)).split()[0])
    assert made == set(KINDS)
