"""The archive that `torch.save` writes of one tensor, read as data.

A zip of stored records: `data.pkl` has dtype, shape and strides, `data/0` the values. torch's own reader unfolds
compressed records, whatever they unfold to, and believes the sizes in `data.pkl`. Here the values are a view of the
bytes, and everything that `torch.save` would not write is refused.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from typing import Any

import torch
from torch import Tensor

from composer3d.checkpoint.restricted_pickle import Asked, Made, unpickle
from composer3d.errors import CheckpointError
from composer3d.torch_compat import CHECKPOINT_REBUILDS

__all__ = ["STORAGE_DTYPES", "tensor_of"]

_MAX_PICKLE_BYTES = 64 * 1024
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
# `torch.save` names a dtype by the storage class that it once had; newer dtypes stand beside an untyped storage.
STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}


class _View(io.RawIOBase):
    """Bytes as a file, without copying them."""

    def __init__(self, data: bytearray) -> None:
        self._data, self._at = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def tensor_of(data: bytearray, *, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """Return the tensor in an archive, as a view of its bytes.

    Args:
        data: The archive, from its first byte to its last.
        dtype: That it has to have.
        sizes: That it has to have.

    Raises:
        CheckpointError: It is no archive of this one tensor, as `torch.save` writes it; without saying where.
    """
    try:
        records = _records(data)
        start, length = records["data.pkl"]
        if length > _MAX_PICKLE_BYTES:
            raise CheckpointError(f"its description has {length:,} bytes, more than any tensor's")
        first, num_bytes = records.get("byteorder", (0, 0))
        order = bytes(data[first : first + num_bytes]).decode("ascii", "replace")
        if order not in ("", sys.byteorder):
            raise CheckpointError(f"its bytes are in the order {order!r:.20}, this machine's are {sys.byteorder}")
        found = unpickle(bytes(data[start : start + length]), allowed=_is_allowed, refusal=_refusal)
        offset, strides = _layout_of(found, dtype, sizes, records["data/0"][1])
        return _view(data, records["data/0"][0], dtype=dtype, sizes=sizes, offset=offset, strides=strides)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive raises nearly anything
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(f"the file is damaged: {what}") from error


def _records(data: bytearray) -> dict[str, tuple[int, int]]:
    """Return start and length in bytes of each record's content, by its name without the archive's."""
    found: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(_View(data)) as archive:
        for info in archive.infolist():
            fields = _LOCAL_HEADER.unpack_from(data, info.header_offset)
            start = info.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise CheckpointError(f"the record {info.filename!r:.60} is compressed, which torch.save never does")
            if fields[0] != b"PK\3\4" or start + info.file_size > len(data):
                raise CheckpointError(f"the file is damaged: the record {info.filename!r:.60} ends after the archive")
            found[info.filename.partition("/")[2]] = (start, info.file_size)
    return found


def _is_allowed(module: str, name: str) -> bool:
    full_name = f"{module}.{name}"
    return (
        full_name in STORAGE_DTYPES
        or full_name in CHECKPOINT_REBUILDS
        or full_name == "collections.OrderedDict"
        or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype))
    )


def _refusal(name: str) -> CheckpointError:
    return CheckpointError(f"refused, nothing was executed: a data file holds more than a tensor: it names {name}")


def _layout_of(found: Any, dtype: torch.dtype, sizes: tuple[int, ...], num_bytes: int) -> tuple[int, tuple[int, ...]]:
    """Return the offset and strides of a tensor in `data.pkl`, validated against the index."""
    if not isinstance(found, Made) or not found.called(*CHECKPOINT_REBUILDS):
        raise CheckpointError("refused, nothing was executed: a data file holds more than a tensor")
    named = found.args[6] if found.called(CHECKPOINT_REBUILDS[1]) else None
    storage, offset, held, strides = found.args[:4]
    kind, key, numel = storage.args[0][1], storage.args[0][2], storage.args[0][4]
    stored = STORAGE_DTYPES[kind.full_name]
    saved = vars(torch)[named.full_name.removeprefix("torch.")] if isinstance(named, Asked) else stored
    held, strides = (tuple(each) for each in (held, strides))
    if any(type(value) is not int or value < 0 for value in (offset, numel, *held, *strides)) or key != "0":
        raise CheckpointError("the file is damaged: its sizes are no numbers")
    if saved != dtype or held != sizes:
        raise CheckpointError(
            f"it holds {list(held)} of {saved}, and the index says {list(sizes)} of {dtype}".replace("torch.", "")
        )
    wanted = math.prod(sizes) * dtype.itemsize
    last = offset + sum((size - 1) * stride for size, stride in zip(held, strides, strict=True))
    if num_bytes != wanted or numel * stored.itemsize != wanted or (wanted and (last + 1) * dtype.itemsize > wanted):
        raise CheckpointError(
            f"its values have {num_bytes:,} bytes, and {list(sizes)} of {dtype} {wanted:,}".replace("torch.", "")
        )
    return offset, strides


def _view(
    data: bytearray, start: int, *, dtype: torch.dtype, sizes: tuple[int, ...], offset: int, strides: tuple[int, ...]
) -> Tensor:
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=math.prod(sizes), offset=start)
    return flat.as_strided(sizes, strides, offset)
