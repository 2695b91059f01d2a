"""Folders and files of weights: safetensors, and what `torch.save` wrote of a state dict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer3d.errors import CheckpointError
from composer3d.importing.foreign_checkpoints.found_state import FoundState, number_in, unwrapped_name
from composer3d.importing.foreign_checkpoints.numbered_state import read_numbered_state
from composer3d.importing.foreign_checkpoints.torch_archive import Note, read_archive

__all__ = ["read_weight_folder"]

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_OTHER_FILES = {
    "scheduler.pt": "of the loop that wrote it",
    "training_args.bin": "pickled objects of a program",
}


def read_weight_folder(path: Path) -> FoundState | None:
    """Return the weights of a Hugging Face folder, of files of safetensors, or of one file; None for others."""
    folder = path if path.is_dir() else path.parent
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".safetensors", ".bin", ".pt", ".pth")]
    indexed = _indexed(path) if path.is_dir() else {}
    if not files and not indexed:
        return None
    found = FoundState(system="weights", step=_step_of(folder, path))
    for file in files:
        for name, tensor in _tensors(file, found.skipped):
            found.weights[unwrapped_name(name)] = tensor
            indexed.pop(name, None)
    if indexed:
        names = ", ".join(sorted(indexed)[:3]) + (f" and {len(indexed) - 3} more" if len(indexed) > 3 else "")
        files_of = ", ".join(sorted(set(indexed.values()))[:3])
        raise CheckpointError(
            f"{path}: its index names {names} in {files_of}, and no such tensor is there; "
            "copy the folder whole, or write the index anew"
        )
    if path.is_dir():
        for file in (path / name for name in _OPTIMIZERS if (path / name).is_file()):
            why = read_numbered_state(file, found)
            found.skipped += [] if why is None else [f"{file.name}: {why}"]
        found.skipped += [f"{name}: {why}" for name, why in _OTHER_FILES.items() if (path / name).is_file()]
        found.skipped += [f"{each.name}: random numbers of a rank" for each in sorted(path.glob("rng_state*"))]
    return found


def _indexed(folder: Path) -> dict[str, str]:
    """Return the file of every tensor that the indices of a folder name; each is beside its index.

    Raises:
        CheckpointError: An index cannot be read, or names a file that is not there, or one outside of the folder.
    """
    found: dict[str, str] = {}
    patterns = ("*.safetensors.index.json", "pytorch_model*.bin.index.json")
    for index in next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), []):
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: cannot be read: {type(error).__name__}: {error}") from error
        for name, file in entries:
            if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
                raise CheckpointError(f"{index}: names {file!r} for {name}, which is no file beside it")
            if not (folder / file).is_file():
                raise CheckpointError(
                    f"{index}: names {file} for {name}, and there is no such file; copy the folder whole"
                )
            found[name] = file
    return found


def _step_of(folder: Path, path: Path) -> int | None:
    state = folder / "trainer_state.json"
    if not state.is_file():
        return number_in([path])
    try:
        steps = json.loads(state.read_text(encoding="utf-8")).get("global_step")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{state}: cannot be read: {error}") from error
    return steps if isinstance(steps, int) and steps >= 0 else None


def _tensors(file: Path, skipped: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a file by name; what else is in it is added to what was not read."""
    import torch

    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    yield name, opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        return
    content = read_archive(file)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            skipped += [f"{other}: beside the weights in {file.name}" for other in content if other != key]
            content = content[key]
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not a state dict")
    for name, value in content.items():
        if isinstance(value, torch.Tensor) and isinstance(name, str):
            yield name, value
        else:
            what = "pickled, which is not read" if isinstance(value, Note) else f"a {type(value).__name__}, no tensor"
            skipped.append(f"{name}: {what}")
