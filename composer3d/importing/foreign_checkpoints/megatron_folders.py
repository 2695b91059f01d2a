"""Folders of Megatron-LM's distributed checkpoints (`torch_dist`), taken apart into parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checkpoint import Saved, open_foreign
from composer3d.errors import CheckpointError
from composer3d.importing.foreign_checkpoints.found_state import FoundState, number_in
from composer3d.importing.foreign_checkpoints.megatron_names import Heads, Naming, naming_of, taken_apart
from composer3d.importing.foreign_checkpoints.megatron_pieces import Pieces, check_gates, check_shared_widths, pieces_of
from composer3d.importing.foreign_checkpoints.torch_archive import Note, read_archive

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_megatron_folder"]

_MARKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"^decoder\.layers\.(?:(?P<number>\d+)\.)?(?P<name>.+)$")
_STATE = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.state\.(?P<state>fp32_param|exp_avg|exp_avg_sq|momentum_buffer)\.(?P<name>.+)$"
)
_BUCKETS = re.compile(r"^(?:chained_\d+\.)?optimizer\.distributed\.")
_MASTER = "fp32_param"


def read_megatron_folder(path: Path, values: Mapping[str, str], naming: str) -> FoundState | None:
    """Return what such a folder holds; None for another one.

    Weights are the optimizer's in float32 where it has them. Each layer's tensors are taken out of the stacked ones.

    Args:
        path: A folder `iter_N` with `.metadata`, or a run's, whose marker names the newest.
        values: Of Megatron-LM's arguments, before those that the folder's `common.pt` says.
        naming: Of the model's parameters, of `NAMINGS`.

    Raises:
        CheckpointError: It is damaged or malicious, the model has no place for a tensor, or the number of heads is not
            known.

    Memory: all tensors, and one stacked tensor once more.
    """
    folder = _newest(path)
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        raise CheckpointError(
            f"{folder}: is of Megatron-LM's format torch, a file for each of its ranks; load it there and save it with "
            "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or convert it with its tools/checkpoint"
        )
    if not (folder / ".metadata").is_file():
        return None
    saved, pickled = open_foreign(folder)
    if not any(_layer_name(key) == "self_attention.linear_proj.weight" for key in saved.entries):
        return None
    common = read_archive(folder / "common.pt") if (folder / "common.pt").is_file() else {}
    arguments = _arguments(common, values)
    found = FoundState(system="megatron", step=number_in([folder]))
    if isinstance(common, dict) and type(common.get("iteration")) is int:
        found.step = common["iteration"]
    found.skipped += _not_read(saved, pickled)
    _add(saved, found, heads=_heads(folder, arguments), naming=naming_of(naming, saved.entries), arguments=arguments)
    steps = set(_steps(common))
    if len(steps) == 1:
        import torch

        done = float(steps.pop())
        for state in found.moments.values():
            state["step"] = torch.tensor(done)
    return found


def _newest(path: Path) -> Path:
    marker = path / _MARKER
    text = marker.read_text(encoding="utf-8", errors="replace").strip() if marker.is_file() else ""
    name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else "release" if text == "release" else ""
    return path / name if name and (path / name).is_dir() else path


def _layer_name(key: str) -> str | None:
    match = _LAYER.match(key)
    return None if match is None else match["name"]


def _arguments(common: Any, values: Mapping[str, str]) -> dict[str, Any]:
    """Return Megatron-LM's arguments: the namespace in `common.pt`, and above it what was given."""
    held = common.get("args") if isinstance(common, dict) else None
    state = held.state if isinstance(held, Note) else held
    stated = {key.replace("-", "_"): _value(value) for key, value in values.items()}
    return {**(state if isinstance(state, dict) else {}), **stated}


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() else {"true": True, "false": False}.get(text.lower(), text)


def _heads(folder: Path, arguments: Mapping[str, Any]) -> Heads:
    heads = arguments.get("num_attention_heads")
    groups = arguments.get("num_query_groups") or heads
    if type(heads) is not int or type(groups) is not int or heads < 1 or groups < 1 or heads % groups:
        raise CheckpointError(
            f"{folder}: queries, keys and values are one tensor, and nothing says of how many heads: add "
            "--arg num_attention_heads=N, and --arg num_query_groups=N where keys have fewer"
        )
    interleaved = bool(arguments.get("rotary_interleaved"))
    return Heads(num_heads=heads, num_groups=groups, pairs_are_neighbours=interleaved)


def _not_read(saved: Saved, pickled: list[str]) -> Iterator[str]:
    extra = [key for key in pickled if "_extra_state" in key]
    yield from (f"{key}: pickled, which is not read" for key in pickled if key not in extra)
    if extra:
        yield f"{extra[0]} and {len(extra) - 1} more: what layers keep for float8, pickled"
    buckets = [key for key in saved.entries if _BUCKETS.match(key)]
    if buckets:
        yield (
            f"{buckets[0]}: the optimizer's state in flat buckets of a layout; save once more with "
            "--dist-ckpt-optim-fully-reshardable to take it along"
        )


def _steps(common: Any) -> Iterator[int]:
    """Yield the steps that the optimizer's groups say."""
    if isinstance(common, dict):
        groups = common.get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and type(group.get("step")) is int:
                yield group["step"]
        for value in common.values():
            yield from _steps(value)


def _add(saved: Saved, found: FoundState, *, heads: Heads, naming: Naming, arguments: Mapping[str, Any]) -> None:
    """Read every tensor, and give its parts their names."""
    centred = arguments.get("apply_layernorm_1p") or arguments.get("layernorm_zero_centered_gamma")
    keys: dict[str, dict[str, str]] = {"": {}}
    for key in saved.entries:
        match = _STATE.match(key)
        if match is not None:
            keys.setdefault(match["state"], {})[match["name"]] = key
        elif not _BUCKETS.match(key):
            keys[""][key] = key
    wholes = {state: pieces_of(named, saved) for state, named in keys.items()}
    weights = wholes.pop("")
    check_gates(weights, saved)
    if naming.shared_is_several:
        check_shared_widths(weights, saved)
    masters = wholes.get(_MASTER, {})
    kept = {name: each for name, each in weights.items() if name not in masters}
    for state, named in ((_MASTER, kept), *wholes.items()):
        for name, pieces in named.items():
            shape = pieces.shape(saved)
            wanted = weights[name].shape(saved) if name in weights else shape
            if shape != wanted:
                key = pieces.keys[0][0]
                found.skipped.append(f"{key}: has the shape {list(shape)}, and the weight {list(wanted)}")
                continue
            for fqn, tensor in _named(saved, name, pieces, heads, naming):
                if state == _MASTER:
                    is_norm = name.endswith(("layernorm.weight", "layer_norm_weight"))
                    found.weights[fqn] = tensor + 1 if centred and is_norm else tensor
                else:
                    found.moments.setdefault(fqn, {})[state] = tensor


def _named(saved: Saved, name: str, pieces: Pieces, heads: Heads, naming: Naming) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors that one of the folder becomes, by name."""
    match = _LAYER.match(name)
    if match is None and name in naming.whole:
        yield naming.whole[name], pieces.read(saved)
        return
    part = "" if match is None else match["name"]
    if match is None or not naming.names(0, part):
        raise CheckpointError(
            f"{saved.path}: {name} has no place in the model: Llamas and mixtures of composer3d.models, and "
            "transformers' models that are named as they are (--names huggingface), are read"
        )
    read = pieces.read(saved)
    layers = [(int(match["number"]), read)] if match["number"] is not None else list(enumerate(read))
    for number, tensor in layers:
        try:
            parts = taken_apart(part, tensor, heads, naming)
        except ValueError as error:
            raise CheckpointError(f"{saved.path}: {name}: {error}") from error
        yield from zip(naming.names(number, part), parts, strict=True)
