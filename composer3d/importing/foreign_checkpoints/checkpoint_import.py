"""Conversion of another system's checkpoint to composer3d's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import checkpoint
from composer3d.errors import CheckpointError
from composer3d.importing.foreign_checkpoints.distributed_folders import read_distributed_folder
from composer3d.importing.foreign_checkpoints.found_state import FoundState
from composer3d.importing.foreign_checkpoints.megatron_folders import read_megatron_folder
from composer3d.importing.foreign_checkpoints.megatron_names import NAMINGS
from composer3d.importing.foreign_checkpoints.weight_folders import read_weight_folder
from composer3d.importing.foreign_checkpoints.zero_files import read_universal_folder, read_zero_folder

if TYPE_CHECKING:
    import torch

__all__ = ["ImportedCheckpoint", "import_checkpoint"]

_READERS = (read_universal_folder, read_zero_folder, read_distributed_folder, read_weight_folder)
# Each optimizer of torch with the state by which it is known; the first that fits.
_OPTIMIZERS = {"AdamW": "exp_avg", "SGD": "momentum_buffer"}


@dataclass(frozen=True, kw_only=True)
class ImportedCheckpoint:
    """Checkpoint that was written.

    Args:
        path: The folder.
        system: That wrote the source.
        step: Optimizer steps that were done.
        num_weights: Tensors of the model.
        num_states: Parameters with optimizer state.
        skipped: What was not read, each with its reason.
    """

    path: Path
    system: str
    step: int
    num_weights: int
    num_states: int
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"composer3d": 1, "ok": True, **vars(self), "path": str(self.path), "skipped": list(self.skipped)}

    def lines(self) -> list[str]:
        """Return it as text, what was not read last."""
        state = f"optimizer state of {self.num_states}" if self.num_states else "no optimizer state, which begins anew"
        first = f"{self.system}: {self.num_weights} tensors, {state}, step {self.step}"
        return [first, *(f"not read: {each}" for each in self.skipped)]


def import_checkpoint(
    source: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    optimizer: str | None = None,
    names: Mapping[str, str] | None = None,
    dtype: str | None = None,
    naming: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> ImportedCheckpoint:
    """Write another system's checkpoint as composer3d's, from which `run --resume` and `run.load` go on.

    Nothing that the source contains is executed: pickles are read with notes in place of objects.

    Args:
        source: A folder of torch.distributed.checkpoint (FSDP, Accelerate, torchtitan), of DeepSpeed (universal, or of
            ZeRO 1 to 3), of Megatron-LM (`torch_dist`), or of weights; or a file of weights.
        folder: In which a folder `step-N` is made.
        step: Optimizer steps that were done, where the source does not say, or others.
        optimizer: The class whose state it is; default: by its names, AdamW or SGD.
        names: Beginnings of names in the source, and what stands in their place in the model's.
        dtype: To which weights and moments are converted, as the run keeps its parameters; default: as they are.
        naming: Of the model whose fused tensors Megatron-LM keeps: "llama", for `composer3d.models:llama`, by default,
            or "huggingface".
        arguments: Megatron-LM's arguments by name, before those that the checkpoint says: heads, and how norms count.

    Raises:
        CheckpointError: It is of no system that is known, damaged, or there is a checkpoint in the folder's place.

    Memory: all tensors on the host.
    """
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"{path}: is not there")
    found = _found(path, naming, arguments or {})
    found = _renamed(found, names or {}, path)
    if dtype is not None:
        found.convert(_dtype(dtype))
    found.step = step if step is not None else found.step
    found = found.complete(path)
    done = found.step or 0
    target = Path(folder) / f"step-{done}"
    if target.exists():
        raise CheckpointError(f"{target}: exists, and is not overwritten; name another folder")
    tensors = {f"model/{fqn}": tensor.contiguous() for fqn, tensor in found.weights.items()}
    for fqn, state in found.moments.items():
        tensors |= {f"optimizer/{fqn}/{name}": tensor.contiguous() for name, tensor in state.items()}
    checkpoint.save(target, tensors=tensors, state=_state(found, done, optimizer))
    return ImportedCheckpoint(
        path=target,
        system=found.system,
        step=done,
        num_weights=len(found.weights),
        num_states=len(found.moments),
        skipped=tuple(found.skipped),
    )


def _found(path: Path, naming: str | None, arguments: Mapping[str, str]) -> FoundState:
    """Return what a checkpoint of any system holds."""
    if naming is not None and naming not in NAMINGS:
        raise CheckpointError(f'"{naming}" names no kind of model; one of: {", ".join(NAMINGS)}')
    found = read_megatron_folder(path, arguments, naming or next(iter(NAMINGS)))
    if found is None and (naming is not None or arguments):
        raise CheckpointError(f"{path}: is no checkpoint of Megatron-LM, whose names and arguments were stated")
    for read in _READERS:
        found = found or read(path)
    if found is None:
        raise CheckpointError(
            f"{path}: is no checkpoint of a system that is read: a folder with .metadata "
            "(torch.distributed.checkpoint, Megatron-LM), zero/ or *_optim_states.pt (DeepSpeed), or *.safetensors"
        )
    return found


def _dtype(name: str) -> torch.dtype:
    import torch

    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CheckpointError(f'"{name}" is no floating-point dtype; write float32, or bfloat16')
    return found


def _renamed(found: FoundState, names: Mapping[str, str], path: Path) -> FoundState:
    for before in names:
        if not any(fqn.startswith(before) for fqn in found.weights):
            some = ", ".join(list(found.weights)[:3])
            raise CheckpointError(f'{path}: no name begins with "{before}"; there are {some}, ...')

    def renamed(fqn: str) -> str:
        before = max((each for each in names if fqn.startswith(each)), key=len, default=None)
        return fqn if before is None else names[before] + fqn.removeprefix(before)

    found.weights = {renamed(fqn): tensor for fqn, tensor in found.weights.items()}
    found.moments = {renamed(fqn): state for fqn, state in found.moments.items()}
    return found


def _state(found: FoundState, step: int, optimizer: str | None) -> dict[str, Any]:
    """Return the part of a checkpoint that is no tensor."""
    state: dict[str, Any] = {
        "format": 1,
        "imported": found.system,
        "next_step": step,
        "states": {
            "attached/run": {"steps": step, "sequences": 0, "tokens": 0, "record": {}},
            "attached/lr_schedule": {"step": step},
        },
        "dispensable": ["attached/run", "attached/lr_schedule"],
    }
    if found.moments:
        held = {name for names in found.moments.values() for name in names}
        name = optimizer or next((cls for cls, known in _OPTIMIZERS.items() if known in held), "AdamW")
        groups = [{"hyperparameters": {}, "parameters": list(found.weights)}]
        tensors = {fqn: list(names) for fqn, names in found.moments.items()}
        state["optimizer"] = {"class": name, "groups": groups, "values": {}, "tensors": tensors}
    return state
