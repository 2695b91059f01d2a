"""Unnamed state file: requests in chunks, several at once, past the page cache where the file system can."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from composer3d import HostMemory, PluginError

__all__ = ["BLOCK", "MIB", "Foreseen", "Range", "StateFile", "padded"]

BLOCK = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
MIB = 2**20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


class Range(NamedTuple):
    """Bytes that are one run in the file and in memory; all multiples of `BLOCK`."""

    offset: int
    position: int
    num_bytes: int


def padded(num_bytes: int) -> int:
    """Return the next multiple of `BLOCK`."""
    return -(-num_bytes // BLOCK) * BLOCK


class StateFile:
    """State of one rank on disk.

    The file has no name (O_TMPFILE), or loses it before anything is written: the system frees it when the process ends,
    whatever ends it.

    Args:
        folder: On the file system to use; None keeps everything in memory, for a run that opens no file.
        chunk_bytes: Most bytes of one request.
        num_threads: Number of concurrent requests.

    Attributes:
        is_direct: Whether requests go past the page cache.
        num_bytes: Size of the file.
        read_bytes: Bytes read since it was opened.
        written_bytes: Bytes written since it was opened.
        waited_s: Seconds in which steps waited for requests.

    Raises:
        PluginError: The folder takes no files, or has no room.
    """

    def __init__(self, folder: Path | None, *, chunk_bytes: int, num_threads: int) -> None:
        self.folder = folder
        self.num_bytes = self.read_bytes = self.written_bytes = 0
        self.waited_s = 0.0
        self._chunk_bytes = chunk_bytes
        self._fd, self.is_direct = (os.memfd_create("optimizer-state"), False) if folder is None else _open(folder)
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="nvme_offload")

    def reserve(self, num_bytes: int) -> int:
        """Extend the file by at least so many allocated bytes, and return their offset."""
        offset, more = self.num_bytes, padded(num_bytes)
        try:
            if more:
                os.posix_fallocate(self._fd, offset, more)
        except OSError as error:
            raise self._failed(error, more) from error
        self.num_bytes += more
        return offset

    def read(self, ranges: Sequence[Range], memory: memoryview) -> list[Future[None]]:
        """Start reading into memory."""
        self.read_bytes += sum(each.num_bytes for each in ranges)
        return [self._workers.submit(self._read, piece, memory) for piece in self._requests(ranges)]

    def write(self, ranges: Sequence[Range], memory: memoryview) -> list[Future[None]]:
        """Start writing from memory."""
        self.written_bytes += sum(each.num_bytes for each in ranges)
        return [self._workers.submit(self._write, piece, memory) for piece in self._requests(ranges)]

    def wait(self, requests: Sequence[Future[None]]) -> None:
        """Return when all are done.

        Raises:
            PluginError: One of them failed: the disk is full, the file was shortened, the device is gone.
        """
        begin_s = time.perf_counter()
        for request in requests:
            request.result()
        self.waited_s += time.perf_counter() - begin_s

    def map(self) -> mmap.mmap:
        """Return the whole file as memory, which the system reads and writes page by page as it is used."""
        return mmap.mmap(self._fd, self.num_bytes)

    def close(self) -> None:
        """End the threads and let the system free the file."""
        self._workers.shutdown()
        os.close(self._fd)

    def _requests(self, ranges: Sequence[Range]) -> list[Range]:
        size = self._chunk_bytes
        return [
            Range(offset + at, position + at, min(size, num_bytes - at))
            for offset, position, num_bytes in ranges
            for at in range(0, num_bytes, size)
        ]

    def _read(self, request: Range, memory: memoryview) -> None:
        done = 0
        while done < request.num_bytes:
            # The system may give less than it was asked for; nothing means that the file ends there.
            target = memory[request.position + done : request.position + request.num_bytes]
            try:
                num_bytes = os.preadv(self._fd, [target], request.offset + done)
            except OSError as error:
                raise self._failed(error, 0) from error
            if num_bytes == 0:
                raise PluginError(
                    f"optimizer state in {self.folder} ends at byte {request.offset + done} of {self.num_bytes}: "
                    "something shortened the file; go on from the last checkpoint"
                )
            done += num_bytes

    def _write(self, request: Range, memory: memoryview) -> None:
        done = 0
        while done < request.num_bytes:
            source = memory[request.position + done : request.position + request.num_bytes]
            try:
                done += os.pwritev(self._fd, [source], request.offset + done)
            except OSError as error:
                raise self._failed(error, request.num_bytes) from error

    def _failed(self, error: OSError, num_bytes: int) -> PluginError:
        if error.errno not in NO_ROOM:
            return PluginError(f"optimizer state in {self.folder}: {error.strerror}")
        free = shutil.disk_usage(self.folder).free if self.folder is not None else 0
        return PluginError(
            f"{self.folder} has no room for optimizer state: {error.strerror}; it holds {self.num_bytes / MIB:.1f} MiB "
            f"of it, {num_bytes / MIB:.1f} MiB more are needed, {free / MIB:.1f} MiB are free",
            hint="name another folder in [sharding.nvme_offload]",
        )


class Foreseen(StateFile):
    """State file of a plan: bytes are counted and kept nowhere, since no machine may hold the planned model.

    Args:
        host: Told what is read and written.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self.folder, self.is_direct = None, False
        self.num_bytes = self.read_bytes = self.written_bytes = 0
        self.waited_s = 0.0

    def reserve(self, num_bytes: int) -> int:
        """Count bytes only."""
        offset = self.num_bytes
        self.num_bytes += padded(num_bytes)
        return offset

    def read(self, ranges: Sequence[Range], memory: memoryview) -> list[Future[None]]:
        """Count bytes only."""
        num_bytes = sum(each.num_bytes for each in ranges)
        self.read_bytes += num_bytes
        self._host.disk("read", num_bytes)
        return []

    def write(self, ranges: Sequence[Range], memory: memoryview) -> list[Future[None]]:
        """Count bytes only."""
        num_bytes = sum(each.num_bytes for each in ranges)
        self.written_bytes += num_bytes
        self._host.disk("write", num_bytes)
        return []

    def close(self) -> None:
        """Nothing is open."""


def _open(folder: Path) -> tuple[int, bool]:
    """Open an unnamed file; return whether it can be read and written past the page cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return _nameless(folder, os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fd = _nameless(folder, 0)
    except OSError as error:
        raise PluginError(
            f"{folder} takes no files: {error.strerror}", hint="name another folder in [sharding.nvme_offload]"
        ) from error
    logger.warning("%s has no O_DIRECT: optimizer state goes through the page cache, and takes memory there", folder)
    return fd, False


def _nameless(folder: Path, flag: int) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flag, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # A file system without O_TMPFILE: the name is gone before there is anything in the file.
    fd, name = tempfile.mkstemp(prefix=".optimizer-state-", dir=folder)
    try:
        # Opened again, because direct access is decided when a file is opened.
        return os.open(name, os.O_RDWR | flag)
    finally:
        os.unlink(name)
        os.close(fd)
