"""`.metadata`, torch's index of a checkpoint: file and offset of every shard, read as data and checked before use.

torch's own reader unpickles it with `pickle.load`, which runs code from an untrusted checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from composer3d.checkpoint.restricted_pickle import Asked, Made, unpickle
from composer3d.errors import CheckpointError
from composer3d.torch_compat import CHECKPOINT_METADATA_GLOBALS, CHECKPOINT_STORAGE_INFO

__all__ = ["Chunk", "Entry", "parse_index"]

_META = "torch.distributed.checkpoint.metadata."
_MAX_DIMS, _MAX_SIZE = 64, 2**62


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the bytes that hold it.

    Args:
        offsets: Of its first element in the tensor.
        sizes: Of the box.
        file: The name of a file of the checkpoint.
        start: First byte in the file.
        length: Bytes, with those of the archive around the values.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint.

    Args:
        shape: Shape of the full tensor, independent of the saved layout.
        dtype: In which it was saved.
        chunks: Boxes that hold each element once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def parse_index(data: bytes, file: Path, skipped: list[str] | None = None) -> dict[str, Entry]:
    """Return the tensors of a checkpoint by key, out of the bytes of its `.metadata`.

    Args:
        data: The file's content.
        file: Where it came from, for errors.
        skipped: Takes the keys of entries that are pickled, which are not read; None refuses them.

    Raises:
        CheckpointError: Damaged or malicious content, entries that are no tensors, or tensors whose chunks do not hold
            each element once.
    """
    try:
        found = unpickle(data, allowed=_is_allowed, refusal=lambda name: _refusal(file, name))
        return _entries(found, file, skipped)
    except CheckpointError as error:
        raise error if str(error).startswith(f"{file.parent}") else CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}") from error


def _refusal(file: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: refused, nothing was executed: it names {name}, which no checkpoint needs; "
        "it is damaged, or made to run code on this machine"
    )


def _is_allowed(module: str, name: str) -> bool:
    return (
        (module, name) in CHECKPOINT_METADATA_GLOBALS
        or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype))
        or (module, name) in (("torch.serialization", "_get_layout"), ("builtins", "getattr"))
        or (module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"))
    )


def _entries(found: Any, file: Path, skipped: list[str] | None) -> dict[str, Entry]:
    if not (isinstance(found, Made) and found.called(f"{_META}Metadata")):
        raise CheckpointError(f"damaged: it holds a {_kind(found)}, not metadata")
    state = _state(found)
    tensors, storage = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise CheckpointError("damaged: its lists of tensors are missing")
    if skipped is not None:
        skipped += [key for key, held in tensors.items() if _is_pickled(held)]
        tensors = {key: held for key, held in tensors.items() if not _is_pickled(held)}
        storage = {at: where for at, where in storage.items() if _state(at).get("fqn") in tensors}
    places = dict(_place(*item) for item in storage.items())
    if len(places) != len(storage):
        raise CheckpointError("damaged: it says twice where a shard is")
    entries = {_key(key): _entry(_key(key), held, places, file) for key, held in tensors.items()}
    if places:
        (key, offsets), _ = places.popitem()
        raise CheckpointError(f"damaged: it says where a shard of {key} at {list(offsets)} is, which no tensor has")
    _refuse_shared_bytes(entries)
    return dict(sorted(entries.items()))


def _is_pickled(held: Any) -> bool:
    return isinstance(held, Made) and held.called(f"{_META}BytesStorageMetadata")


def _kind(found: Any) -> str:
    return type(found).full_name.rpartition(".")[2] if isinstance(found, Made) else type(found).__name__


def _state(made: Any) -> dict[str, Any]:
    if not isinstance(made, Made) or not isinstance(made.state, dict):
        raise CheckpointError(f"damaged: a {_kind(made)} has no fields")
    return made.state


def _key(key: object) -> str:
    if type(key) is not str:
        raise CheckpointError(f"damaged: the key {key!r:.60} is a {type(key).__name__}, not a string")
    return key


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    """Return the numbers of a `torch.Size`."""
    found = value.args[0] if isinstance(value, Made) and value.called("torch.Size") and len(value.args) == 1 else value
    if not isinstance(found, tuple | list) or len(found) > _MAX_DIMS:
        raise CheckpointError(f"damaged: {what} is no list of sizes")
    return tuple(_number(each, what) for each in found)


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise CheckpointError(f"damaged: {what} has {value!r:.60} where a number of 0 or more is needed")
    return value


def _place(index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Return key and offsets of a chunk, and where its bytes are."""
    if not (isinstance(index, Made) and index.called(f"{_META}MetadataIndex")):
        raise CheckpointError(f"damaged: it says where a {_kind(index)} is")
    if not (isinstance(info, Made) and info.called(CHECKPOINT_STORAGE_INFO)):
        raise CheckpointError(f"damaged: a {_kind(info)} says where a shard is")
    at, where = _state(index), _state(info)
    key, name = _key(at.get("fqn")), where.get("relative_path")
    if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
        raise CheckpointError(f"refused: its data would come from {name!r:.200}, outside the folder")
    if where.get("transform_descriptors"):
        raise CheckpointError("refused: its data pass through extensions, which are not run")
    start, length = (_number(where.get(field), f"the place of {key}") for field in ("offset", "length"))
    return (key, _numbers(at.get("offset"), f"the place of {key}")), (name, start, length)


def _entry(key: str, held: Any, places: dict[Any, tuple[str, int, int]], file: Path) -> Entry:
    if _is_pickled(held):
        raise CheckpointError(f"{file.parent}: {key} is saved as pickled bytes, which are never read; only tensors are")
    if not (isinstance(held, Made) and held.called(f"{_META}TensorStorageMetadata")):
        raise CheckpointError(f"damaged: {key} is a {_kind(held)}, not a tensor")
    fields = _state(held)
    shape, dtype = _numbers(fields.get("size"), f"the shape of {key}"), _dtype(key, fields.get("properties"))
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise CheckpointError(f"damaged: {key} has no list of chunks")
    chunks = tuple(_chunk(key, each, places) for each in listed)
    for chunk in chunks:
        if math.prod(chunk.sizes) * dtype.itemsize > chunk.length:
            raise CheckpointError(
                f"damaged: {key} has a chunk of {list(chunk.sizes)} in {chunk.length:,} bytes of {chunk.file}, "
                "which cannot hold it"
            )
    problem = _cover(shape, chunks)
    if problem:
        raise CheckpointError(f"damaged: the chunks of {key} {problem} of its shape {list(shape)}")
    return Entry(shape=shape, dtype=dtype, chunks=chunks)


def _dtype(key: str, properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Made) and properties.called(f"{_META}TensorProperties") else None
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[0], Asked):
        raise CheckpointError(f"damaged: {key} has no dtype")
    dtype = vars(torch).get(state[0].full_name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"damaged: {key} has the dtype {state[0].full_name}, which torch does not know")
    layout = state[1].args if isinstance(state[1], Made) else ()
    if layout != ("torch.strided",):
        raise CheckpointError(f"tensors of layout {layout[0] if layout else state[1]!r:.60} are not read")
    return dtype


def _chunk(key: str, held: Any, places: dict[Any, tuple[str, int, int]]) -> Chunk:
    if not (isinstance(held, Made) and held.called(f"{_META}ChunkStorageMetadata")):
        raise CheckpointError(f"damaged: {key} has a {_kind(held)} for a chunk")
    fields = _state(held)
    offsets, sizes = (_numbers(fields.get(field), f"a chunk of {key}") for field in ("offsets", "sizes"))
    place = places.pop((key, offsets), None)
    if place is None:
        raise CheckpointError(f"damaged: it does not say where the chunk of {key} at {list(offsets)} is")
    return Chunk(offsets=offsets, sizes=sizes, file=place[0], start=place[1], length=place[2])


def _cover(shape: Sequence[int], chunks: Sequence[Chunk]) -> str:
    """Return how chunks fail to hold each element of a shape once; empty where they do.

    If as many elements are held as there are and no two boxes overlap, none is missing.
    """
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return "have other numbers of dims than those"
        if any(at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return f"lie outside: one of {list(chunk.sizes)} at {list(chunk.offsets)}, outside"
    held, whole = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if held != whole:
        return f"hold {held:,} elements, and there are {whole:,} elements"
    return "hold some elements twice and others never" if _overlap(shape, chunks) else ""


def _overlap(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether two boxes overlap, by a sweep along the dim with the most boundaries."""
    boxes = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(boxes) < 2:
        return False
    if not shape:
        return True
    dim = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in boxes}))
    active: list[Chunk] = []
    for box in sorted(boxes, key=lambda chunk: chunk.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        if any(_meet(box, other) for other in active):
            return True
        active.append(box)
    return False


def _meet(one: Chunk, other: Chunk) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in pairs)


def _refuse_shared_bytes(entries: dict[str, Entry]) -> None:
    """Refuse two chunks in the same bytes: a writer gives each its own."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for key, chunk in _all_chunks(entries):
        by_file.setdefault(chunk.file, []).append((chunk.start, chunk.start + chunk.length, key))
    for name, regions in by_file.items():
        regions.sort()
        for (_, end, one), (start, _, other) in zip(regions, regions[1:], strict=False):
            if start < end:
                raise CheckpointError(f"damaged: {one} and {other} lie in the same bytes of {name}")


def _all_chunks(entries: dict[str, Entry]) -> Iterable[tuple[str, Chunk]]:
    for key, entry in entries.items():
        for chunk in sorted(entry.chunks, key=attrgetter("start")):
            yield key, chunk
