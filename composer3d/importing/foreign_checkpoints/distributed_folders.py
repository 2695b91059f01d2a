"""Folders of torch.distributed.checkpoint, as torchtitan, Accelerate's FSDP and loops over FSDP write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from composer3d.checkpoint import open_foreign, read_into
from composer3d.importing.foreign_checkpoints.found_state import FoundState, number_in, unwrapped_name

__all__ = ["read_distributed_folder"]

_INDEX = ".metadata"
_STATE = re.compile(
    r"^(?:(?:app\.)?(?:optimizers?|optim)\.)?state\.(?P<fqn>.+)\.(?P<name>exp_avg|exp_avg_sq|max_exp_avg_sq|step|"
    r"momentum_buffer)$"
)
_GROUPS = re.compile(r"^(?:(?:app\.)?(?:optimizers?|optim)\.)?param_groups\.")
_OTHERS = re.compile(r"^(?:app\.)?(?:lr_schedulers?|dataloader|train_state|rng_state|scheduler|sampler|extra)\b")
_MODEL = ("app.model.", "model.")


def read_distributed_folder(path: Path) -> FoundState | None:
    """Return what such a folder holds; None for another one.

    Args:
        path: A folder with `.metadata`, or Accelerate's, with `pytorch_model_fsdp_0` and `optimizer_0` in it.

    Raises:
        CheckpointError: An index is damaged or malicious.

    Memory: all tensors.
    """
    inner = sorted(folder for folder in path.glob("*") if (folder / _INDEX).is_file())
    folders = [path] if (path / _INDEX).is_file() else inner
    if not folders:
        return None
    is_accelerate = any(folder.name.startswith("pytorch_model_fsdp") for folder in folders)
    found = FoundState(system="accelerate" if is_accelerate else "dcp", step=number_in([path]))
    for folder in folders:
        _add(folder, found)
    return found


def _add(folder: Path, found: FoundState) -> None:
    import torch

    saved, pickled = open_foreign(folder)
    found.skipped += [f"{key}: pickled, which is not read" for key in pickled]
    wanted: dict[str, tuple[str, str]] = {}
    states = {key: match for key in saved.entries if (match := _STATE.match(key))}
    groups = [key for key in saved.entries if key not in states and _GROUPS.match(key)]
    others = [key for key in saved.entries if key not in states and _OTHERS.match(key)]
    found.skipped += [f"{key}: a hyperparameter, which the manifest says" for key in groups]
    found.skipped += [f"{key}: of the loop that wrote it" for key in others]
    for key, match in states.items():
        wanted[key] = (unwrapped_name(match["fqn"]), match["name"])
    names = [key for key in saved.entries if key not in {*states, *groups, *others}]
    prefix = _prefix(names, {fqn for fqn, _ in wanted.values()})
    for key in names:
        wanted[key] = (unwrapped_name(key.removeprefix(prefix)), "")
    for key, (fqn, name) in wanted.items():
        tensors = {key: torch.empty(saved.entries[key].shape, dtype=saved.entries[key].dtype)}
        read_into(saved, tensors)
        if name:
            found.moments.setdefault(fqn, {})[name] = tensors[key]
        else:
            found.weights[fqn] = tensors[key]


def _prefix(names: Iterable[str], fqns: set[str]) -> str:
    """Return what stands before all names of the model; where the optimizer knows them, so that they are its."""
    names = list(names)
    for prefix in _MODEL:
        if names and all(name.startswith(prefix) for name in names):
            stripped = {unwrapped_name(name.removeprefix(prefix)) for name in names}
            return prefix if not fqns or fqns <= stripped else ""
    return ""
