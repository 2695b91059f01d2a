"""Files that `torch.save` wrote, read as data: tensors are views of the file, and objects inert notes of themselves.

No name in a pickle is looked up: a class made for this one file takes the place of each class and function.
"""

from __future__ import annotations

import math
import mmap
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d.checkpoint import STORAGE_DTYPES, Asked
from composer3d.errors import CheckpointError
from composer3d.torch_compat import CHECKPOINT_PARAMETER, CHECKPOINT_REBUILDS

__all__ = ["Note", "read_archive"]

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MAX_PICKLE_BYTES = 256 * 2**20


class Note(dict[Any, Any], metaclass=Asked):
    """An object in a pickle, as what it was made of: `args` of its call, `state`, and items that were set."""

    full_name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Note:
        """Note a call."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Keep the state; no attribute is set from it."""
        self.state = state

    def append(self, item: Any) -> None:
        """Keep what is appended, by its number."""
        self[len(self)] = item

    def extend(self, items: Any) -> None:
        """Keep what is appended, by its number."""
        for item in items:
            self.append(item)


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, storages: dict[str, tuple[int, int]], data: mmap.mmap) -> None:
        super().__init__(file)
        self._storages, self._data = storages, data
        self._known: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name == CHECKPOINT_PARAMETER:
            return _same
        if full_name in CHECKPOINT_REBUILDS:
            return self._tensor if full_name == CHECKPOINT_REBUILDS[0] else self._named_tensor
        if full_name not in self._known:
            self._known[full_name] = Asked("Note", (Note,), {"full_name": full_name})
        return self._known[full_name]

    def persistent_load(self, identifier: Any) -> Any:
        _, kind, key, _, numel = identifier
        start, num_bytes = self._storages[f"data/{key}"]
        return kind.full_name, start, num_bytes

    def _tensor(self, storage: Any, offset: int, sizes: Any, strides: Any, *_: Any) -> Tensor:
        return self._view(storage, STORAGE_DTYPES.get(storage[0]), offset, sizes, strides)

    def _named_tensor(self, storage: Any, offset: int, sizes: Any, strides: Any, *rest: Any) -> Tensor:
        dtype = vars(torch).get(rest[2].full_name.removeprefix("torch.")) if len(rest) > 2 else None
        return self._view(storage, dtype, offset, sizes, strides)

    def _view(self, storage: Any, dtype: Any, offset: int, sizes: Any, strides: Any) -> Tensor:
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"damaged: a tensor has a storage of {storage[0]}")
        sizes, strides = _numbers(sizes), _numbers(strides)
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if not math.prod(sizes):
            return torch.empty(sizes, dtype=dtype)
        if min(offset, *strides, 0) < 0 or (last + 1) * dtype.itemsize > storage[2]:
            raise CheckpointError("damaged: a tensor ends after its values")
        count = storage[2] // dtype.itemsize
        flat = torch.frombuffer(self._data, dtype=dtype, count=count, offset=storage[1])
        return flat.as_strided(sizes, strides, offset)


def _same(data: Any, *_: Any) -> Any:
    return data


def _numbers(value: Any) -> tuple[int, ...]:
    found = value.args[0] if isinstance(value, Note) and value.args else value
    if not all(type(each) is int and each >= 0 for each in found):
        raise CheckpointError("damaged: the sizes of a tensor are no numbers")
    return tuple(found)


def read_archive(path: Path) -> Any:
    """Return what `torch.save` wrote: dicts, lists, plain values and tensors, and a `Note` for any other object.

    Memory: none for tensors, which are private views of the file.

    Args:
        path: A file.

    Raises:
        CheckpointError: It is no such file, of the format before torch 1.6, or damaged.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            with zipfile.ZipFile(file) as archive:
                records = dict(_records(archive, data))
                start, length = records["data.pkl"]
                order = bytes(data[slice(*_ends(records.get("byteorder", (0, 0))))]).decode("ascii", "replace")
                if length > _MAX_PICKLE_BYTES or order not in ("", sys.byteorder):
                    raise CheckpointError("its description is too long, or its bytes are in another order")
                with archive.open(next(n for n in archive.namelist() if n.endswith("/data.pkl"))) as description:
                    return _Reader(description, records, data).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path}: {error}: torch before 1.6 wrote no archives, and such files cannot be read without running them; "
            "load it there, and save it anew with torch.save"
        ) from error
    except Exception as error:  # a damaged archive raises nearly anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"{path}: cannot be read: {what}") from error


def _ends(record: tuple[int, int]) -> tuple[int, int]:
    return record[0], record[0] + record[1]


def _records(archive: zipfile.ZipFile, data: mmap.mmap) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield start and length in bytes of each record's content, by its name without the archive's."""
    for info in archive.infolist():
        fields = _LOCAL_HEADER.unpack_from(data, info.header_offset)
        start = info.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
        if info.compress_type != zipfile.ZIP_STORED or start + info.file_size > len(data):
            raise CheckpointError(f"the record {info.filename!r:.60} is compressed, or ends after the file")
        yield info.filename.partition("/")[2], (start, info.file_size)
