"""Digests of a checkpoint's files, computed while they are written and compared with every byte that is read.

`checksums.json` lists, for each file, consecutive parts that cover it: their lengths and digests. A part is what is
read at once, a shard of a tensor or a small file as a whole: a rank that reads its shards alone reads nothing more to
verify them. The list carries a digest of itself. xxh3 finds damage, not forgery: who can write the files can write the
list. It is 9 times as fast as SHA-256 with the processor's instructions for that; `benchmarks/checksum_cost.py` says
what it adds to a save.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from composer3d.errors import CheckpointError

__all__ = ["CHECKSUMS", "Checksums", "DigestedFile", "Part", "digest", "open_file", "read_checksums", "write_file"]

CHECKSUMS = "checksums.json"
ALGORITHM = "xxh3_128"
FORMAT = 1
_PIECE_BYTES = 2**20  # in the cache from its copy to its digest; smaller ones are more calls of the system
_MEND = "go on from another checkpoint, or from a copy of this file"

Part = tuple[int, str]


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return 128 bits of xxh3, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class DigestedFile:
    """A file that is written in parts, each with its digest.

    A large write is written and digested piece by piece: the digest finds in the processor's cache what the system has
    just copied. Memory is read once, and reading it takes five times as long as the digest of what is cached.

    Args:
        file: Open for writing bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._state = xxhash.xxh3_128()
        self._length = self._offset = 0
        self.parts: list[Part] = []

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes into the current part."""
        view = data if isinstance(data, bytes) else memoryview(data).cast("B")
        length = len(view)
        for begin in range(0, length, _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES] if length > _PIECE_BYTES else view
            self._file.write(piece)
            self._state.update(piece)
        self._length += length
        return length

    def tell(self) -> int:
        """Return how many bytes were written, and end the current part there.

        A writer knows where something begins by asking; so whatever it notes as written is made of whole parts.
        """
        if self._length:
            self.parts.append((self._length, self._state.hexdigest()))
            self._state.reset()
            self._offset, self._length = self._offset + self._length, 0
        return self._offset

    def flush(self) -> None:
        """Flush to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the descriptor; everything has been flushed to the system."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """End the last part and close the file."""
        self.tell()
        self._file.close()


def write_file(file: Path, content: bytes, *, mode: int = 0o666) -> list[Part]:
    """Write a small file, wait until it is on disk, and return its one part.

    Args:
        file: To write.
        content: Of the file.
        mode: Who may read and write it, less the process's umask.
    """
    with open(file, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    return [(len(content), digest(content))]


def open_file(file: Path) -> IO[bytes]:
    """Open a file for reading; a pipe, a device or a folder is refused before anything waits for it.

    Raises:
        CheckpointError: It is missing, or no ordinary file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file}: damaged: it is no ordinary file")
    return os.fdopen(descriptor, "rb")


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The digests of one checkpoint.

    Args:
        folder: Of the checkpoint, complete.
        files: The parts of each file, by its name.
    """

    folder: Path
    files: Mapping[str, list[Part]]

    def write(self) -> None:
        """Write the list into its folder and wait until it is on disk."""
        write_file(self.folder / CHECKSUMS, _encoded(self.files))

    def verify_sizes(self) -> None:
        """Compare the files' lengths alone, of all files of the checkpoint.

        Raises:
            CheckpointError: A file is missing, shorter or longer.
        """
        for name, parts in sorted(self.files.items()):
            expected = sum(length for length, _ in parts)
            try:
                found = os.stat(self.folder / name)
            except OSError as error:
                raise CheckpointError(f"{self.folder / name}: damaged: {type(error).__name__}: {error}") from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{self.folder / name}: damaged: it is no ordinary file")
            if found.st_size != expected:
                raise CheckpointError(
                    f"{self.folder / name}: damaged: it has {found.st_size:,} bytes, {expected:,} were written; {_MEND}"
                )

    def parts_of(self, name: str) -> dict[tuple[int, int], str]:
        """Return the digests of a file's parts by offset and length."""
        found: dict[tuple[int, int], str] = {}
        offset = 0
        for length, value in self.files.get(name, ()):
            found[offset, length] = value
            offset += length
        return found

    def verify(self, name: str, data: bytes | bytearray | memoryview, *, offset: int = 0) -> None:
        """Verify the digests of the parts read from a file.

        Args:
            name: Of the file in the checkpoint's folder.
            data: One part of it, whole.
            offset: The part's first byte in the file.

        Raises:
            CheckpointError: They differ, or no such part was written.
        """
        expected = self.parts_of(name).get((offset, len(data)))
        verify_part(self.folder / name, data, offset=offset, expected=expected)


def verify_part(file: Path, data: bytes | bytearray | memoryview, *, offset: int, expected: str | None) -> None:
    """Compare a part that was read with its digest; None: no such part was written.

    Raises:
        CheckpointError: They differ.
    """
    where = f"bytes {offset:,} to {offset + len(data):,}"
    if expected is None:
        raise CheckpointError(f"{file}: damaged: {CHECKSUMS} knows no part of {where}; {_MEND}")
    if digest(data) != expected:
        raise CheckpointError(f"{file}: damaged: {where} are not what was written, by their digest; {_MEND}")


def read_checksums(path: Path) -> Checksums | None:
    """Return a checkpoint's digests; None where it was saved without, by a composer3d before they were.

    Raises:
        CheckpointError: The list is damaged.
    """
    file = path / CHECKSUMS
    if not os.path.lexists(file):
        return None
    with open_file(file) as opened:
        data = opened.read()
    try:
        files = {name: [(int(length), str(value)) for length, value in parts] for name, parts in _files(data)}
        is_whole = _encoded(files) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}") from error
    if not is_whole or any(os.path.basename(name) != name or name in ("", ".", "..") for name in files):
        raise CheckpointError(f"{file}: damaged: its content is not what was written, by its digest; {_MEND}")
    return Checksums(folder=path, files=files)


def _files(data: bytes) -> Any:
    content = json.loads(data)
    version = content["content"]["composer3d"]
    if version != FORMAT:
        raise ValueError(f"format {version!r}, and this composer3d reads format {FORMAT}")
    return content["content"]["files"].items()


def _encoded(files: Mapping[str, list[Part]]) -> bytes:
    """Return the one form in which a list is written, so that a list with any other byte differs."""
    listed = {name: [list(part) for part in parts] for name, parts in sorted(files.items())}
    content = json.dumps({"composer3d": FORMAT, "algorithm": ALGORITHM, "files": listed}, separators=(",", ":"))
    return f'{{"content": {content},\n"digest": "{digest(content.encode())}"}}\n'.encode()
