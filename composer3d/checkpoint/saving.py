"""Saving a checkpoint over all ranks, at once or in the background; a kill at any moment leaves the last good one."""

from __future__ import annotations

import atexit
import logging
import shutil
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from composer3d import torch_compat
from composer3d.checkpoint.checkpoint_folder import STATE, prepare, publish, require_name
from composer3d.checkpoint.checksums import Checksums, DigestedFile, Part
from composer3d.checkpoint.joint_failure import rank_of, together
from composer3d.checkpoint.staging import Staging
from composer3d.checkpoint.state_file import encode_state, write_state
from composer3d.errors import CheckpointError
from composer3d.processes.foreign_peers import refuse_foreign_peers
from composer3d.processes.json_exchange import gather_json, scatter_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

__all__ = ["AFTER_ERROR_S", "AsyncSaver", "save"]

AFTER_ERROR_S = 3.0  # lets a save that is nearly complete finish, so that a restart can use it

log = logging.getLogger(__name__)


def save(path: Path, *, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint, sharded over all ranks, and point the folder's marker at it.

    Everything goes into `<path>.tmp` and is synced to disk; rank 0 then renames it and moves the marker. The folder
    must be one that all ranks see. A key that several ranks hold as a plain tensor is written once; tensors that
    differ between ranks need different keys. An existing checkpoint of this name is replaced; anything else is refused.

    Args:
        path: The final folder, for example `runs/a/checkpoints/step-100`.
        tensors: This rank's plain tensors and DTensors by key; the union over ranks is saved.
        state: JSON values in nested dicts; rank 0's is written.

    Raises:
        CheckpointError: On all ranks alike, if any rank fails; earlier checkpoints are intact.

    Memory: one tensor's copy on the host at a time. Collectives: a gather and a scatter of plans, gathers of where
    chunks are and of the files' digests, and eight all-gathers of small objects.
    """
    _write(_request(path, tensors, state), None)


class AsyncSaver:
    """Saves in a thread while training continues.

    `save` returns once the tensors are copied to host memory, but for steady ones; the thread writes the copies over
    its own gloo group, so its collectives cannot meet those of training. The rename and the marker come when all ranks
    are done. One save is in flight at a time. Every method is called by all ranks. A process that ends without `close`
    waits for the save in flight, a few seconds where an exception ends it.

    Args:
        staging: Owns the copies; default one of its own.

    Memory: one copy of this rank's tensors on the host, kept for the next save.
    """

    def __init__(self, staging: Staging | None = None) -> None:
        self._pending: futures.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None
        self._staging = staging or Staging()

    def save(
        self, path: Path, *, tensors: Mapping[str, Tensor], state: Mapping[str, Any], steady: Collection[str] = ()
    ) -> None:
        """Have tensors and state written as they are now; arguments as `composer3d.checkpoint.save`.

        Waits for the save before it, and raises that one's error instead of beginning.

        Args:
            path: As there.
            tensors: As there.
            state: As there.
            steady: Keys of tensors that nobody writes to until the staging's `settle`: they are copied meanwhile.

        Raises:
            CheckpointError: Of the save before.

        Collectives: the first call makes a process group; the rest happen in the thread.
        """
        self.wait()
        if self._group is None and dist.is_initialized():
            with refuse_foreign_peers():
                self._group = dist.new_group(backend="gloo", group_desc="composer3d_checkpoint")
        request = _request(path, tensors, state)
        if request.refusal is None:
            request = replace(request, tensors=self._staging.take(request.tensors, steady=steady))
        self._pending = futures.Future()
        arguments = (self._pending, request, self._staging, self._group)
        # A daemon: a save that waits for a rank that hangs must not keep the process from its end.
        self._thread = threading.Thread(target=_fulfil, args=arguments, name="composer3d-checkpoint", daemon=True)
        self._thread.start()
        atexit.unregister(self._finish)
        atexit.register(self._finish)

    def wait(self) -> None:
        """Return when nothing is in flight; raise the error of the last save if it failed."""
        pending, self._pending = self._pending, None
        thread, self._thread = self._thread, None
        if pending is not None and thread is not None:
            # Also until it has released tensors and the group: releasing them during exit would abort the process.
            thread.join()
            pending.result()

    def close(self, *, at_most_s: float | None = None) -> None:
        """Wait, then give back the process group; raise the error of the last save if it failed.

        Args:
            at_most_s: Seconds after which a save in flight is left to itself, with its process group; None waits for
                as long as it takes.
        """
        atexit.unregister(self._finish)
        pending = self._pending
        if pending is not None and at_most_s is not None:
            futures.wait([pending], timeout=at_most_s)
            if not pending.done():
                log.warning("the save in flight was not done after %g s, and is left", at_most_s)
                return
        try:
            self.wait()
        finally:
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _finish(self) -> None:
        """Close before Python ends, which would truncate the save, or abort the process, without a message."""
        if self._pending is not None and not self._pending.done() and not (self._thread and self._thread.is_alive()):
            return  # a fork of the process that saves: it has no such thread
        self.close(at_most_s=AFTER_ERROR_S if hasattr(sys, "last_value") else None)


def _fulfil(
    pending: futures.Future[None], request: _Request, staging: Staging, group: dist.ProcessGroup | None
) -> None:
    """Write, and pass the outcome to the waiting thread."""
    try:
        try:
            staging.wait()
        except CheckpointError as error:
            request = replace(request, refusal=error)
        _write(request, group)
    except BaseException as error:
        pending.set_exception(error)
    else:
        pending.set_result(None)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Content of a checkpoint; `refusal` is what this rank found wrong with it, which all ranks exchange."""

    path: Path
    tensors: dict[str, Tensor]
    text: str
    refusal: CheckpointError | None


def _request(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> _Request:
    text, refusal = "", None
    try:
        require_name(path)
        if rank_of(None) == 0:
            text = encode_state(state)
        for key, tensor in tensors.items():
            _refuse(key, tensor)
    except CheckpointError as error:
        refusal = error
    return _Request(path=path, tensors=dict(tensors), text=text, refusal=refusal)


def _refuse(key: str, tensor: object) -> None:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{key} is a {type(tensor).__name__}, not a tensor; it belongs into the state")
    local: Tensor = tensor.detach()
    if isinstance(local, DTensor):
        if any(placement.is_partial() for placement in local.placements):
            raise CheckpointError(f"{key} is a DTensor with unreduced placements {local.placements}; reduce it first")
        local = local.to_local()
    if type(local) is not Tensor:
        # Such a tensor would be pickled, and a pickled tensor cannot be read safely.
        raise CheckpointError(f"{key} is a {type(local).__name__}; save the plain tensors of which it consists")
    if local.is_meta:
        raise CheckpointError(f"{key} is on the meta device and has no values to save")


def _write(request: _Request, group: dist.ProcessGroup | None) -> None:
    path, is_first = request.path, rank_of(group) == 0
    beside = path.parent / f"{path.name}.tmp"

    def begin() -> None:
        if request.refusal is not None:
            raise request.refusal
        if is_first:
            prepare(path)

    def look() -> None:
        if not beside.is_dir():
            raise CheckpointError("this rank does not see the folder that rank 0 made; all ranks must share it")

    def fill() -> dict[str, list[Part]]:
        parts = _write_tensors(path, beside, request.tensors, group)
        return parts | ({STATE: write_state(beside, request.text)} if is_first else {})

    def finish() -> None:
        if gathered is not None:
            files = {name: parts for own in gathered for name, parts in own.items()}
            Checksums(folder=beside, files=files).write()
            publish(path)

    together(group, path, begin)
    try:
        together(group, path, look)  # by itself: who fails here would be waited for among torch's collectives
        own = together(group, path, fill)
        gathered = gather_json(own, group=group)
        together(group, path, finish)
    except CheckpointError:
        if is_first:
            with suppress(OSError):  # frees space on a full disk; otherwise the next save removes it
                shutil.rmtree(beside)
        raise
    log.info("saved %s", path)


def _write_tensors(
    path: Path, folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, list[Part]]:
    """Write this rank's shards, and on the first rank the index; return the parts of the files that this rank wrote."""
    written: dict[str, list[Part]] = {}
    with _without_crc32():
        _write_shards(path, tensors, group, _writer_to(folder, written))
    return written


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave out the zip archives' own CRC-32: no reader of torch's looks at it, and it is half of the time of a save.

    The setting is this thread's.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _writer_to(folder: Path, written: dict[str, list[Part]]) -> FileSystemWriter:
    """Return torch's writer, which notes the parts of every file that it writes, with their digests."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class DigestingFileSystem(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                file = DigestedFile(cast("IO[bytes]", stream))
                yield file
                file.close()
            written[Path(path).name.removesuffix(".tmp")] = file.parts

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            # Without the path: the folder gets its name later, and may be moved.
            return StorageMeta(save_id=self.save_id)

        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                # torch.save reports a full disk as an "unexpected pos"; what happened is in the chain behind it.
                raise _cause(error) from error

    writer = Writer(folder)
    writer.fs = DigestingFileSystem()
    return writer


def _write_shards(
    path: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, writer: FileSystemWriter
) -> None:
    """Take the steps of torch's `save`, which sends plans and results as pickles; here they are JSON.

    The first rank decides who writes what several ranks hold, and writes the index.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    rank = rank_of(group)

    def begin() -> SavePlan:
        planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def share() -> tuple[Metadata, list[Any]] | None:
        if everyones is None:
            return None
        plans, metadata = planner.create_global_plan(
            [torch_compat.checkpoint_plans.plan_of_items(items) for items in everyones]
        )
        return metadata, [
            torch_compat.checkpoint_plans.planned_items(*pair) for pair in zip(plans, everyones, strict=True)
        ]

    def write() -> list[Any]:
        mine = torch_compat.checkpoint_plans.with_items(plan, kept)
        # The writer names files by the plan's place in its list, and looks at no other one.
        mine = planner.finish_plan(writer.prepare_global_plan([mine] * (rank + 1))[rank])
        return torch_compat.checkpoint_plans.write_items(writer.write_data(mine, planner).wait())

    def finish() -> None:
        if shared is not None and results is not None:
            writer.finish(shared[0], [torch_compat.checkpoint_plans.results_of_items(each) for each in results])

    plan = together(group, path, begin)
    everyones = gather_json(torch_compat.checkpoint_plans.plan_items(plan), group=group)
    shared = together(group, path, share)
    kept = scatter_json(None if shared is None else shared[1], group=group)
    results = gather_json(together(group, path, write), group=group)
    together(group, path, finish)


def _cause(error: BaseException) -> BaseException:
    """Return the operating system's error behind an error, else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error
