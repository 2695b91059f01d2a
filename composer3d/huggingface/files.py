"""Safetensors files of a folder: their tensors, read whole or in slices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["INDEX", "SINGLE", "StoredTensor", "WeightFiles"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
}


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Metadata of one tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The weights of a folder; opening reads the headers alone.

    Args:
        folder: Holds `model.safetensors`, or several files and `model.safetensors.index.json`.

    Attributes:
        tensors: All of them, by their names in the files, sorted.
        num_bytes_read: Of values, by this process so far.

    Raises:
        ModelError: There are no such files, one of them is missing or damaged, or the index does not fit them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_bytes_read = 0
        self._open: dict[str, Any] = {}
        self.tensors: Mapping[str, StoredTensor] = dict(sorted(self._found().items()))

    def _found(self) -> dict[str, StoredTensor]:
        """Return every tensor; of one that several files hold, the one that the index names."""
        mapped = self._mapped()
        files = self._single() if mapped is None else sorted(set(mapped.values()))
        found: dict[str, StoredTensor] = {}
        headers = {file: self._header(file) for file in files}
        for file, header in headers.items():
            for name, stored in header.items():
                if name in found and (mapped is None or name not in mapped):
                    raise ModelError(f'{self.folder} holds "{name}" twice: in {found[name].file} and in {file}')
                found[name] = stored
        for name, file in (mapped or {}).items():
            if name not in headers[file]:
                raise ModelError(f'{self.folder / INDEX} says that "{_short(name)}" is in {file}, which lacks it')
            found[name] = headers[file][name]
        return found

    def _mapped(self) -> dict[str, str] | None:
        """Return the file of each tensor as the index has it, None where there is no index."""
        index = self.folder / INDEX
        if not index.is_file():
            return None
        try:
            content = json.loads(index.read_bytes())
        except (ValueError, OSError, RecursionError) as error:
            raise ModelError(f"{index} is damaged: {type(error).__name__}: {str(error):.200}") from error
        mapped = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(mapped, dict) or not mapped:
            raise ModelError(f'{index} is damaged: it has no "weight_map" of names of tensors to names of files')
        for name, file in mapped.items():
            if not isinstance(file, str):
                what = _short(json.dumps(file))
                raise ModelError(f'{index} is damaged: the file of "{_short(name)}" is {what}, no name')
        for file in sorted(set(mapped.values())):
            self._refuse_outside(file)
        return mapped

    def _refuse_outside(self, file: str) -> None:
        """Refuse a file that is not in the folder: who made the folder would choose what is read of this machine."""
        index, path = self.folder / INDEX, self.folder / file
        if not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ModelError(f"{index} names {_short(file)!r}, which is outside the folder")
        try:
            is_there, target = path.is_file(), path.resolve()
        except OSError as error:
            raise ModelError(f"{index} names {_short(file)!r}: {error.strerror}") from error
        if not is_there:
            raise ModelError(f"{index} names {_short(file)}, which is not there")
        inside = [self.folder.resolve()]
        if inside[0].parent.name == "snapshots":  # of the Hugging Face cache, whose files are links to its blobs
            inside.append(inside[0].parent.parent)
        if not any(target.is_relative_to(folder) for folder in inside):
            raise ModelError(
                f"{index} names {_short(file)}, which is a link to {target}, outside the folder",
                hint="put the file itself into the folder",
            )

    def _single(self) -> list[str]:
        if (self.folder / SINGLE).is_file():
            return [SINGLE]
        pickled = [name for name in _PICKLED if (self.folder / name).is_file()]
        if pickled:
            raise ModelError(
                f"{self.folder} holds weights as {pickled[0]} alone, and reading that may execute code",
                hint="load it with transformers once, and save_pretrained it as safetensors",
            )
        raise ModelError(
            f"{self.folder} holds no weights ({SINGLE}, or {INDEX})",
            key="weights",
            hint='weights = "init" starts from the configuration alone',
        )

    def _header(self, file: str) -> dict[str, StoredTensor]:
        handle = self._handle(file)
        found = {}
        for name in handle.keys():  # noqa: SIM118  # it is no mapping
            part = handle.get_slice(name)
            found[name] = StoredTensor(file=file, shape=tuple(part.get_shape()), dtype=str(part.get_dtype()))
        return found

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{self.folder / file} cannot be read: {error}") from error
        return self._open[file]

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Read a part of a tensor, on the CPU.

        Args:
            name: In the files.
            ranges: (start, stop) of every dim.
        """
        handle = self._handle(self.tensors[name].file)
        if not ranges:
            part: Tensor = handle.get_tensor(name)
        else:
            part = handle.get_slice(name)[tuple(slice(start, stop) for start, stop in ranges)]
        self.num_bytes_read += part.numel() * part.element_size()
        return part

    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the first floating-point tensor, None where there is none."""
        import torch

        names = (_DTYPES.get(stored.dtype, "") for stored in self.tensors.values())
        dtypes = (getattr(torch, name) for name in names if name)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), None)

    def fingerprint(self) -> int:
        """Return a 64-bit digest of names, shapes, dtypes and sizes of files."""
        sizes = [(file, (self.folder / file).stat().st_size) for file in sorted(self._open)]
        digest = hashlib.blake2b(repr((sizes, list(self.tensors.items()))).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big")
