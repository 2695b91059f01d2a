"""Loading of a checkpoint into existing tensors of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from composer3d.checkpoint.joint_failure import together
from composer3d.checkpoint.reader import Saved, TensorInfo, open_saved, read_into
from composer3d.checkpoint.state_file import read_state
from composer3d.errors import CheckpointError
from composer3d.processes.json_exchange import all_gather_json

__all__ = ["load"]

MAX_SHOWN = 5


def load(
    path: Path,
    *,
    tensors: Mapping[str, Tensor],
    allow_extra: Sequence[str] = (),
    before_reading: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint and return its state.

    Plain tensors and DTensors of any placement; the layout may differ from the one that was saved. Keys are compared
    both ways before anything is changed: what this rank has must be in the checkpoint with the same shape and dtype,
    and what the checkpoint holds must be on at least one rank. All ranks raise alike.

    Args:
        path: The checkpoint, `<folder>/step-N`.
        tensors: This rank's tensors by key; pipeline ranks give different ones.
        allow_extra: Prefixes of keys that the checkpoint may hold in excess.
        before_reading: Called once nothing was found against the checkpoint, and tensors are about to be filled.

    Returns:
        The state that was saved, as JSON gives it back: tuples are lists.

    Raises:
        CheckpointError: Missing, half-written, damaged, unsafe, or of another model, with the first differences. After
            a read error some tensors may already hold new values.

    Memory: one saved chunk at a time. Collectives: three all-gathers of small objects.
    """
    state, saved = together(None, path, partial(_open, path))
    known = saved.infos()
    keys = sorted(known)
    surplus = "".join("01"[key not in tensors and not key.startswith(tuple(allow_extra))] for key in keys)
    reports = all_gather_json((_differences(tensors, known), surplus))
    extra = [key for key, *flags in zip(keys, *(flags for _, flags in reports), strict=True) if "0" not in flags]
    differences = list(dict.fromkeys(text for texts, _ in reports for text in texts))
    differences += [f"the checkpoint also holds {key}" for key in extra]
    if differences:
        more = f"; and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
        raise CheckpointError(f"{path}: of another model or optimizer: {'; '.join(differences[:MAX_SHOWN])}{more}")
    before_reading()
    together(None, path, lambda: read_into(saved, dict(tensors)))
    return state


def _open(path: Path) -> tuple[dict[str, Any], Saved]:
    return read_state(path), open_saved(path)


def _differences(tensors: Mapping[str, Tensor], known: Mapping[str, TensorInfo]) -> list[str]:
    found: list[str] = []
    for key, tensor in sorted(tensors.items()):
        info = known.get(key)
        if info is None:
            found.append(f"the checkpoint lacks {key}")
        elif info.shape != tuple(tensor.shape):
            held, wanted = list(info.shape), list(tensor.shape)
            found.append(f"the checkpoint holds {key} of shape {held}, the model has {wanted}")
        elif info.dtype != tensor.dtype:
            held_dtype, wanted_dtype = (str(dtype).removeprefix("torch.") for dtype in (info.dtype, tensor.dtype))
            found.append(f"the checkpoint holds {key} as {held_dtype}, the model has {wanted_dtype}")
    return found
