"""DeepSpeed's checkpoints: universal ones, and those of ZeRO 1 to 3 as its ranks write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer3d.errors import CheckpointError
from composer3d.importing.foreign_checkpoints.found_state import FoundState, number_in, unwrapped_name
from composer3d.importing.foreign_checkpoints.torch_archive import Note, read_archive

__all__ = ["read_universal_folder", "read_zero_folder"]

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_STAGE_3 = 3


def _inside(path: Path, *, universal: bool) -> Path:
    """Return the folder of the step that a run's marker names, where a run's folder was given."""
    marker = path / ("latest_universal" if universal else "latest")
    name = marker.read_text(encoding="utf-8", errors="replace").strip() if marker.is_file() else ""
    is_name = name and "/" not in name and name not in (".", "..")
    return path / name if is_name and (path / name).is_dir() else path


def read_universal_folder(path: Path) -> FoundState | None:
    """Return what a universal checkpoint holds, by its folder or the run's; None for another folder."""
    folder = _inside(path, universal=True)
    if not (folder / "zero").is_dir():
        return None
    found = FoundState(system="deepspeed-universal", step=number_in([folder]))
    for parameter in sorted(each for each in (folder / "zero").iterdir() if each.is_dir()):
        fqn = unwrapped_name(parameter.name)
        for file in sorted(parameter.glob("*.pt")):
            content = read_archive(file)
            tensor = content.get("param", content) if isinstance(content, dict) else content
            if file.stem == "fp32":
                found.weights[fqn] = _tensor(tensor, file)
            elif file.stem == "step":
                found.moments.setdefault(fqn, {})["step"] = _as_tensor(tensor)
            elif file.stem in _MOMENTS:
                found.moments.setdefault(fqn, {})[file.stem] = _tensor(tensor, file)
            else:
                found.skipped.append(f"{parameter.name}/{file.name}: no state that is known")
    return found


def _tensor(value: Any, file: Path) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}, not a tensor")
    return value


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def read_zero_folder(path: Path) -> FoundState | None:
    """Return what a checkpoint of ZeRO 1 to 3 holds, joined from all ranks' files; None for another folder.

    Raises:
        CheckpointError: A rank's file is missing, the model was over several model-parallel ranks, or sizes differ.

    Memory: all tensors once, beside views of the files.
    """
    folder = _inside(path, universal=False)
    files = sorted(
        (int(match[1]), int(match[2]), file)
        for file in folder.glob("*_optim_states.pt")
        if (match := _OPTIMIZER_FILE.fullmatch(file.name))
    )
    if not files:
        return None
    if any(mp for _, mp, _ in files):
        raise CheckpointError(
            f"{folder}: its model was over several model-parallel ranks, whose shards only DeepSpeed's "
            "ds_to_universal.py names; convert it with that, and import the folder it writes"
        )
    states = [_optimizer_state(file) for _, _, file in files]
    num_ranks = _number(states[0].get("partition_count"), len(states))
    if [rank for rank, _, _ in files] != list(range(num_ranks)):
        raise CheckpointError(f"{folder}: was written by {num_ranks} ranks, and has files of {len(files)}")
    stage = int(states[0].get("zero_stage", 1))
    model = read_archive(_model_file(folder, stage))
    shapes = [dict(_shapes(group)) for group in model["param_shapes"]]
    found = FoundState(system=f"deepspeed-zero-{stage}", step=_steps_of(model, folder))
    read = _of_stage_3 if stage == _STAGE_3 else _of_stage_1
    for name, kind, tensor in read(states, shapes, folder):
        fqn = unwrapped_name(name)
        if kind:
            found.moments.setdefault(fqn, {})[kind] = tensor
        else:
            found.weights[fqn] = tensor
    _add_rest(found, model, folder)
    return found


def _optimizer_state(file: Path) -> Mapping[str, Any]:
    content = read_archive(file)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: has no optimizer_state_dict")
    return state


def _number(value: Any, default: int) -> int:
    found = value[0] if isinstance(value, list) and value else value
    return int(found) if isinstance(found, int) else default


def _model_file(folder: Path, stage: int) -> Path:
    names = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
    for name in names if stage == _STAGE_3 else names[::-1]:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: {names[1]} is missing, which has the names and shapes of the parameters")


def _shapes(group: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, size in group.items():
        yield name, tuple(size.args[0]) if isinstance(size, Note) else tuple(size)


def _steps_of(model: Mapping[str, Any], folder: Path) -> int | None:
    steps = model.get("global_steps")
    return steps if isinstance(steps, int) else number_in([folder])


def _moments_of(state: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the state of one flat group in an optimizer of torch, of DeepSpeed's stages 1 and 2 or 3."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict", {}))
    if isinstance(inner, list):  # of `elastic_checkpoint`
        return inner[index] if index < len(inner) else {}
    by_index = inner.get("state", {}) if isinstance(inner, dict) else {}
    found = by_index.get(index, {})
    return found if isinstance(found, dict) else {}


def _of_stage_1(
    states: list[Mapping[str, Any]], shapes: list[dict[str, tuple[int, ...]]], folder: Path
) -> Iterator[tuple[str, str, Any]]:
    """Yield each parameter of stages 1 and 2, where ranks hold following parts of a flat group."""
    import torch

    for index, group in enumerate(shapes):
        parts = [state["single_partition_of_fp32_groups"][index] for state in states]
        flat = {"": torch.cat([part.reshape(-1) for part in parts])}
        moments = [_moments_of(state, index) for state in states]
        for kind in _MOMENTS:
            if all(kind in each for each in moments):
                flat[kind] = torch.cat([each[kind].reshape(-1) for each in moments])
        needed = sum(math.prod(shape) for shape in group.values())
        for kind, values in flat.items():
            if values.numel() < needed:
                raise CheckpointError(f"{folder}: group {index} has {values.numel():,} values, and needs {needed:,}")
            offset = 0
            for name, shape in group.items():
                yield name, kind, values[offset : offset + math.prod(shape)].reshape(shape)
                offset += math.prod(shape)
        if "step" in moments[0]:
            for name in group:
                yield name, "step", _as_tensor(moments[0]["step"])


def _of_stage_3(
    states: list[Mapping[str, Any]], shapes: list[dict[str, tuple[int, ...]]], folder: Path
) -> Iterator[tuple[str, str, Any]]:
    """Yield each parameter of stage 3, of which every rank holds a part, padded to the same length."""
    import torch

    num_ranks, num_groups = len(states), len(states[0]["fp32_flat_groups"])
    flat = {"": [torch.cat([part.reshape(-1) for part in state["fp32_flat_groups"]]) for state in states]}
    moments = [[_moments_of(state, index) for index in range(num_groups)] for state in states]
    for kind in _MOMENTS:
        if all(kind in group for own in moments for group in own):
            flat[kind] = [torch.cat([group[kind].reshape(-1) for group in own]) for own in moments]
    for kind, parts in flat.items():
        offset = 0
        for name, shape in (item for group in shapes for item in group.items()):
            size = math.ceil(math.prod(shape) / num_ranks)
            if any(part.numel() < offset + size for part in parts):
                raise CheckpointError(f"{folder}: a rank has {parts[0].numel():,} values, which end inside {name}")
            whole = torch.cat([part[offset : offset + size] for part in parts])
            yield name, kind, whole[: math.prod(shape)].reshape(shape)
            offset += size
    if moments[0] and "step" in moments[0][0]:
        for name in (name for group in shapes for name in group):
            yield name, "step", _as_tensor(moments[0][0]["step"])


def _add_rest(found: FoundState, model: Mapping[str, Any], folder: Path) -> None:
    """Add buffers and frozen parameters, of which the model's own file has the values, and name the rest."""
    import torch

    for name, value in (model.get("module") or {}).items():
        fqn = unwrapped_name(name)
        if fqn not in found.weights and isinstance(value, torch.Tensor) and value.numel():
            found.weights[fqn] = value
    shared = model.get("shared_params")
    for name, source in shared.items() if isinstance(shared, dict) else ():
        found.weights.pop(unwrapped_name(name), None)
        found.skipped.append(f"{name}: the same tensor as {source}")
    for name, value in model.items():
        if isinstance(value, Note) and name != "module":
            found.skipped.append(f"{name}: an object of {type(value).full_name}, which is not made")
