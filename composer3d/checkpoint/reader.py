"""Reading torch's distributed checkpoints without executing anything that they contain.

torch's own reader unpickles `.metadata` with `pickle.load`, and pickled entries with `weights_only=False`: a checkpoint
from a stranger is a program. Here an unpickler with an allow-list reads the first, and the second are refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer3d.checkpoint.folder import METADATA, require
from composer3d.errors import CheckpointError
from composer3d.torch_compat import CHECKPOINT_METADATA_GLOBALS

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["TensorInfo", "contents", "open_reader", "read_into", "read_metadata", "read_tensor", "read_tensors"]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a checkpoint says about one of its tensors.

    Args:
        shape: Of the full tensor, whatever its layout was.
        dtype: As saved.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows only the classes of which torch's checkpoint metadata consists."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class, else raise a CheckpointError that names what was asked for."""
        if (module, name) in CHECKPOINT_METADATA_GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath
        raise CheckpointError(
            f"{self.path}: refused, nothing was executed: it names {module}.{name}, which no checkpoint needs; "
            "it is damaged, or made to run code on this machine"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise CheckpointError(f"tensors of layout {name} are not read")
    return torch.strided


def _enum_member(owner: object, name: str) -> Enum:
    # Python 3.11.0 to 3.11.3 pickle an enum member as getattr(its class, its name); nothing else may use getattr.
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise CheckpointError(f"refused, nothing was executed: it names builtins.getattr of {owner!r}")
    return owner[name]


def read_metadata(path: Path) -> Metadata:
    """Return a checkpoint's metadata, read with the allow-list and checked.

    Raises:
        CheckpointError: No complete checkpoint, a damaged or malicious `.metadata`, or entries that are not tensors.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    require(path)
    try:
        with (path / METADATA).open("rb") as file:
            metadata = MetadataUnpickler(file, path / METADATA).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path / METADATA}: damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path / METADATA}: damaged: it holds a {type(metadata).__name__}, not metadata")
    _check(metadata, path)
    return metadata


def _check(metadata: Metadata, path: Path) -> None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CheckpointError(f"{path / METADATA}: damaged: its lists of tensors are missing")
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{path}: {key} is saved as pickled bytes, which are never read; only tensors are")
    for info in storage.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path / METADATA}: refused: its data would come from {name!r}, outside the folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path / METADATA}: refused: its data pass through extensions, which are not run")


def open_reader(path: Path, metadata: Metadata) -> FileSystemReader:
    """Return a reader of tensors for torch's load planners, which takes the metadata as already checked."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
    from torch.futures import Future

    class TensorReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            if any(item.type == LoadItemType.BYTE_IO for item in plan.items):
                raise CheckpointError(f"{path}: pickled bytes are never read")
            # Only tensors are left, and those torch reads with weights_only=True.
            return super().read_data(plan, planner)

    return TensorReader(path)


def read_into(path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's tensors from a checkpoint.

    The default load plan of a rank does not depend on other ranks, so the steps of torch's `load` are taken without
    its collectives (and without its warning that a single process is a single process).
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = open_reader(path, metadata)
    try:
        with torch.no_grad():
            planner.set_up_planner(tensors, metadata, True)
            reader.set_up_storage_reader(metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
            reader.read_data(planner.finish_plan(plan), planner).wait()
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: refused, nothing was executed: a data file holds more than a tensor") from error
    except Exception as error:  # a truncated archive raises nearly anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"{path}: its tensors cannot be read, the files are damaged: {what}") from error


def contents(path: Path) -> dict[str, TensorInfo]:
    """Return the shape and dtype of every tensor in a checkpoint, by key. Reads no tensor, needs no process group."""
    return {key: _info(entry) for key, entry in sorted(read_metadata(path).state_dict_metadata.items())}


def read_tensors(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors one at a time, in this process alone, on the CPU. Memory: one tensor at a time."""
    metadata = read_metadata(path)
    for key in keys:
        if key not in metadata.state_dict_metadata:
            raise CheckpointError(f"{path}: the checkpoint lacks {key}")
        info = _info(metadata.state_dict_metadata[key])
        tensors = {key: torch.empty(info.shape, dtype=info.dtype, device="cpu")}
        read_into(path, metadata, tensors)
        yield key, tensors[key]


def read_tensor(path: Path, key: str) -> Tensor:
    """Return one full tensor, read in this process alone, on the CPU."""
    return next(tensor for _, tensor in read_tensors(path, [key]))


def _info(entry: Any) -> TensorInfo:
    return TensorInfo(shape=tuple(entry.size), dtype=entry.properties.dtype)
