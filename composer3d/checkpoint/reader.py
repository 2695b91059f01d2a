"""Reading torch's distributed checkpoints: executing nothing that they contain, and verifying each byte that is used.

torch's own reader unpickles `.metadata` with `pickle.load`, and pickled entries with `weights_only=False`: a checkpoint
from a stranger is a program. Here both are read as data; see `composer3d.checkpoint.restricted_pickle`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from composer3d.checkpoint.archive import tensor_of
from composer3d.checkpoint.checkpoint_folder import METADATA, require
from composer3d.checkpoint.checksums import Checksums, open_file, read_checksums, verify_part
from composer3d.checkpoint.index import Chunk, Entry, parse_index
from composer3d.checkpoint.joint_failure import rank_of
from composer3d.checkpoint.state_file import read_state
from composer3d.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

__all__ = ["Saved", "TensorInfo", "contents", "open_foreign", "open_saved", "read_into", "read_tensor", "read_tensors"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Metadata of one tensor of a checkpoint.

    Args:
        shape: Shape of the full tensor, independent of the saved layout.
        dtype: In which it was saved.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was opened: its index was read and verified, its tensors were not.

    Args:
        path: The folder `step-N`.
        entries: Its tensors by key.
        checksums: The digests of its files; None where it was saved without.
    """

    path: Path
    entries: dict[str, Entry]
    checksums: Checksums | None

    def infos(self) -> dict[str, TensorInfo]:
        """Return the shape and dtype of every tensor, by key."""
        return {key: TensorInfo(shape=entry.shape, dtype=entry.dtype) for key, entry in self.entries.items()}


def open_saved(path: Path) -> Saved:
    """Read and verify a checkpoint's index; on the first rank also compare the lengths of all its files.

    Raises:
        CheckpointError: No complete checkpoint, a damaged or malicious one, or entries that are not tensors.
    """
    require(path)
    checksums = read_checksums(path)
    is_first = rank_of(None) == 0
    if checksums is None:
        read_state(path)  # which says whether there were digests
    if checksums is None and is_first:
        log.warning(
            "%s: saved without digests, by an earlier composer3d: damage to its files would not be noticed; "
            "what is saved from now on has them",
            path,
        )
    with open_file(path / METADATA) as file:
        data = file.read()
    entries = parse_index(data, path / METADATA)  # first, so that one made to run code is called that
    if checksums is not None:
        checksums.verify(METADATA, data)
        if is_first:
            checksums.verify_sizes()
    return Saved(path=path, entries=entries, checksums=checksums)


def open_foreign(path: Path) -> tuple[Saved, list[str]]:
    """Read the index of a folder that torch's own `save` wrote; return it, and the keys of entries that are pickled.

    Raises:
        CheckpointError: There is no index, or it is damaged or malicious.
    """
    skipped: list[str] = []
    with open_file(path / METADATA) as file:
        entries = parse_index(file.read(), path / METADATA, skipped)
    return Saved(path=path, entries=entries, checksums=None), sorted(skipped)


def read_into(saved: Saved, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's tensors from a checkpoint.

    The default load plan of a rank does not depend on other ranks, so the steps of torch's `load` are taken without
    its collectives (and without its warning that a single process is a single process).
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with torch.no_grad():
            planner.set_up_planner(tensors, _metadata(saved.entries), True)
            plan = planner.create_local_plan()
            plan = planner.finish_plan(planner.create_global_plan([plan])[0])
            _fill(saved, plan.items, planner)
    except CheckpointError:
        raise
    except Exception as error:  # torch's planner raises nearly anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"{saved.path}: its tensors cannot be read: {what}") from error


def _metadata(entries: dict[str, Entry]) -> Metadata:
    """Return the index in torch's classes, of which its planner takes shapes and chunks."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    return Metadata(
        {
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.dtype),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
            for key, entry in entries.items()
        }
    )


def _fill(saved: Saved, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    """Read file by file, each from its beginning to its end."""
    wanted: dict[str, list[tuple[Chunk, ReadItem]]] = {}
    chunks = {
        key: {chunk.offsets: chunk for chunk in saved.entries[key].chunks}
        for key in {item.storage_index.fqn for item in items}
    }
    for item in items:
        index = item.storage_index
        chunk = chunks[index.fqn][tuple(index.offset or ())]
        wanted.setdefault(chunk.file, []).append((chunk, item))
    for name, reads in wanted.items():
        with open_file(saved.path / name) as file:
            digests = None if saved.checksums is None else saved.checksums.parts_of(name)
            for chunk, item in sorted(reads, key=lambda read: read[0].start):
                tensor = _read(saved, chunk, file, digests, saved.entries[item.storage_index.fqn].dtype)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    tensor = tensor.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor)
                planner.commit_tensor(item, target)


def _read(
    saved: Saved, chunk: Chunk, file: IO[bytes], digests: dict[tuple[int, int], str] | None, dtype: torch.dtype
) -> Tensor:
    """Return one chunk, verified, as a view of the bytes that were read."""
    path = saved.path / chunk.file
    _refuse_beyond(path, file, [chunk])
    data = bytearray(chunk.length)
    file.seek(chunk.start)
    if file.readinto(data) != chunk.length:  # type: ignore[attr-defined]
        raise CheckpointError(f"{path}: damaged: it ended while it was read")
    if digests is not None:
        verify_part(path, data, offset=chunk.start, expected=digests.get((chunk.start, chunk.length)))
    try:
        return tensor_of(data, dtype=dtype, sizes=chunk.sizes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: bytes {chunk.start:,} to {chunk.start + chunk.length:,}: {error}") from error


def _refuse_beyond(path: Path, file: IO[bytes], chunks: Sequence[Chunk]) -> None:
    """Refuse chunks that end after their file, whose length is not in the index."""
    size, end = os.fstat(file.fileno()).st_size, max(chunk.start + chunk.length for chunk in chunks)
    if end > size:
        raise CheckpointError(f"{path}: damaged: it has {size:,} bytes, and a chunk ends at {end:,}")


def contents(path: Path) -> dict[str, TensorInfo]:
    """Return the shape and dtype of every tensor in a checkpoint, by key. Reads no tensor, needs no process group."""
    return open_saved(path).infos()


def read_tensors(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors one at a time, in this process alone, on the CPU. Memory: one tensor and a chunk at a time."""
    saved = open_saved(path)
    for key in keys:
        if key not in saved.entries:
            raise CheckpointError(f"{path}: the checkpoint lacks {key}")
        entry = saved.entries[key]
        for name in {chunk.file for chunk in entry.chunks}:
            with open_file(path / name) as file:  # before memory is allocated
                _refuse_beyond(path / name, file, [chunk for chunk in entry.chunks if chunk.file == name])
        tensors = {key: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")}
        read_into(saved, tensors)
        yield key, tensors[key]


def read_tensor(path: Path, key: str) -> Tensor:
    """Return one full tensor, read in this process alone, on the CPU."""
    return next(tensor for _, tensor in read_tensors(path, [key]))
