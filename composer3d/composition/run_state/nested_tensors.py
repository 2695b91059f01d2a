"""Tensors inside of nested state: taken out when it is saved, and blank ones in their places when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import checkpoint
from composer3d.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["blank", "take_out"]

TENSOR = "__tensor__"


def take_out(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Move tensors from nested state into `tensors`, leaving their shape and dtype behind."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[key] = checkpoint.unwrapped(value.detach())
        return {TENSOR: [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, Mapping):
        return {name: take_out(item, f"{key}/{name}", tensors) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [take_out(item, f"{key}/{index}", tensors) for index, item in enumerate(value)]
    return value


def blank(
    value: Any, key: str, path: Path, present: Mapping[str, Tensor], known: Mapping[str, checkpoint.TensorInfo]
) -> Any:
    """Restore nested state with tensors, to be filled by the load, where `_take_out` took them from.

    Where the state has such a tensor now it is that one, so that what is sharded stays sharded; otherwise an empty one.
    The checkpoint's JSON names the tensors of its first rank: where the state has tensors now, those of this rank are
    filled, which on another stage of a pipeline are others.
    """
    if isinstance(value, Mapping) and value.keys() == {TENSOR}:
        info = known.get(key)
        if info is None or value[TENSOR] != [list(info.shape), str(info.dtype).removeprefix("torch.")]:
            held = "none" if info is None else f"one of {list(info.shape)} in {info.dtype}".replace("torch.", "")
            raise CheckpointError(f'{path}: "{key}" is a tensor {value[TENSOR]!r:.80}, and the checkpoint holds {held}')
        return _like(present.get(key), info)
    if isinstance(value, Mapping):
        own_names = _names_in(key, present)
        names = [name for name, item in value.items() if not (own_names and _is_tensor(item) and name not in own_names)]
        filled = {name: blank(value[name], f"{key}/{name}", path, present, known) for name in names}
        own = {name: f"{key}/{name}" for name in own_names if name not in value}
        return filled | {
            name: _like(present[at], known[at]) for name, at in own.items() if at in present and at in known
        }
    if isinstance(value, list):
        return [blank(item, f"{key}/{index}", path, present, known) for index, item in enumerate(value)]
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {TENSOR}


def _names_in(key: str, present: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that a state has now right under a key; an FQN has no slash."""
    return [at.removeprefix(f"{key}/") for at in present if at.rpartition("/")[0] == key]


def _like(own: Tensor | None, info: checkpoint.TensorInfo) -> Tensor:
    """Return a tensor of this state that a saved one can be read into, or an empty one of its shape."""
    import torch

    fits = own is not None and own.shape == info.shape and own.dtype is info.dtype
    return own if fits and own is not None else torch.empty(info.shape, dtype=info.dtype)
