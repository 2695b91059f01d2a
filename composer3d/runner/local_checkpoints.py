"""Checkpoints in the memory of the nodes: each rank's state in a file of its node's tmpfs and of a peer's.

A file in tmpfs is host memory that outlives the process. What dies with a node is its memory: the states of its ranks
are then those that ranks of the next node have kept for them. Both nodes lost, or all of them, leave the storage's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import all_gather_json, broadcast_json
from composer3d.checkpoint import Staging
from composer3d.composition import StoredState
from composer3d.errors import CheckpointError
from composer3d.processes import private_folder_in, refuse_foreign_peers
from composer3d.runner.abandoned_states import claim_states, remove_abandoned_states
from composer3d.runner.reporting.progress import attempt_before

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from composer3d import Composition
    from composer3d.manifest import Manifest

__all__ = ["LocalCheckpoints", "local_checkpoints", "states_folder"]

_KEPT = 2  # steps: a rank may have written one that another has not
_NAME = re.compile(r"step-(\d+)-of-(\d+)-rank-(\d+)")
_TOKEN = "local.json"  # in the run's folder: states of a run whose folder is gone are of no use to another

log = logging.getLogger(__name__)


def states_folder(folder: str | None, *, is_made: bool = True) -> Path:
    """Return the folder of this user's states, which other users have no access to.

    Args:
        folder: `checkpoint.local_folder`; default: where a machine has a file system in memory, else that of temporary
            files.
        is_made: Make it if it is not there; otherwise only look.

    Raises:
        ForkError: Something else is there, or another user's folder.
    """
    default = "/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"
    advice = "remove it, or give checkpoint.local_folder another folder, of every node"
    return private_folder_in(Path(folder or default), "composer3d-local", advice=advice, is_made=is_made)


def local_checkpoints(run: Composition, manifest: Manifest, *, record: Mapping[str, Any]) -> LocalCheckpoints | None:
    """Return the run's checkpoints in the memory of nodes; None where the manifest asks for none.

    Args:
        run: The composition.
        manifest: Of the run.
        record: What must be equal where a run resumes.
    """
    table, train = manifest.tables["checkpoint"], manifest.tables["train"]
    if table.local_every is None:
        return None
    whole = {**record, "batch": [train.global_batch, train.batch_ramp], "steps": train.steps}
    return LocalCheckpoints(run, manifest.output, table.local_folder, whole)


class LocalCheckpoints:
    """States of ranks on their own nodes; every method is called by all ranks.

    Args:
        run: The composition.
        output: The run's folder.
        folder: On every node; None takes `/dev/shm`.
        record: Compared with what was kept: another run's is left alone.

    Memory: two states of this rank in files, and on several nodes two of a peer's; while one is written, a copy of the
    state and its bytes. Collectives: a process group of their own; over it, in a thread, a message to a peer a save.
    """

    def __init__(self, run: Composition, output: Path, folder: str | None, record: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        context, self._output = run.context, output
        self._run, self._rank, self._world_size = run, context.rank, context.world_size
        described = json.dumps([record, str(context.layout)], sort_keys=True, default=str)
        self._record = sha256(described.encode()).hexdigest()
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        self._ranks_here = here if self._world_size % here == 0 else self._world_size
        token = broadcast_json(_token(output) if self._rank == 0 else None)
        # The folder is this user's alone.
        base = states_folder(folder)
        self._base = base / sha256(str(output.absolute()).encode()).hexdigest()[:16]
        self._states = self._base / token
        self._own = self._states / f"node-{os.environ.get('GROUP_RANK', '0')}"
        self._own.mkdir(parents=True, exist_ok=True)
        self._lock = claim_states(self._base, output)
        remove_abandoned_states(base)
        self._remove_unfinished(token)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staging = Staging()
        with refuse_foreign_peers():
            self._group: ProcessGroup | None = dist.new_group(backend="gloo", group_desc="composer3d_local")

    def _remove_unfinished(self, token: str) -> None:
        """Remove what is left of other starts of the run, whose folder was removed, and of killed ranks' writes."""
        for other in self._base.iterdir():
            if other.is_dir() and other.name != token:
                shutil.rmtree(other, ignore_errors=True)
        if self._rank % self._ranks_here == 0:  # nobody writes before all have begun, which a group's making waits for
            for beside in self._own.glob("*.tmp"):
                beside.unlink(missing_ok=True)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Copy this rank's state, and have it written and sent in a thread.

        Args:
            step: Steps done.

        Raises:
            CheckpointError: The one before could not be written; the run has those of the storage alone.
        """
        self.wait()
        arguments = step, self._run.rank_state.copy(self._staging)
        self._thread = threading.Thread(target=self._write, args=arguments, name="composer3d-local", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is in flight."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"rank {self._rank} could not keep its state in {self._own}: {error}; give checkpoint.local_folder "
                "another place, or remove checkpoint.local_every"
            ) from error

    def close(self, *, forget: bool) -> None:
        """End the process group.

        Args:
            forget: Remove the states: the run has ended, and the storage has the last one.
        """
        import torch.distributed as dist

        self.wait()
        if self._group is not None and dist.is_initialized():
            if forget:
                dist.barrier(group=self._group)
            dist.destroy_process_group(self._group)
        self._group = None
        self._lock.close()
        if forget:
            shutil.rmtree(self._base, ignore_errors=True)

    def _write(self, step: int, stored: StoredState) -> None:
        try:
            self._staging.wait()
            data = _encoded(stored, self._record)
            self._put(step, self._rank, data)
            if self._ranks_here < self._world_size:
                self._exchange(step, data)
            self._remove_old(step)
        except BaseException as error:
            self._error = error

    def _exchange(self, step: int, data: bytes) -> None:
        """Send this rank's state to the same place on the next node, and keep that of the node before."""
        to = (self._rank + self._ranks_here) % self._world_size
        come = (self._rank - self._ranks_here) % self._world_size
        self._put(step, come, _swapped(data, to=to, come=come, group=self._group))

    def _put(self, step: int, rank: int, data: bytes) -> None:
        path = self._own / _name(step, self._world_size, rank)
        beside = path.with_suffix(".tmp")
        with beside.open("wb") as file:
            file.write(data)
        beside.rename(path)

    def _remove_old(self, step: int) -> None:
        # Of ranks that share the node each removes what it has written: its own states, and its peer's.
        place = self._rank % self._ranks_here
        found = [(path, parsed) for path in self._own.iterdir() if (parsed := _parsed(path)) is not None]
        own = [(at, path) for path, (at, _, rank) in found if rank % self._ranks_here == place]
        kept = sorted({at for at, _ in own})[-_KEPT:]
        for at, path in own:
            if at not in kept:
                path.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Remove the states on this node: the run begins elsewhere."""
        for path in self._here().values():
            path.unlink(missing_ok=True)

    # ---- recovery ----------------------------------------------------------------------------------------------------

    def later_than(self, start: int, *, resume: str) -> int | None:
        """Return the step to go on from where it is later than the storage's; None where the storage's is the one.

        Args:
            start: Of the checkpoint that `resume` means.
            resume: As for `choose_checkpoint`; another beginning than `auto` removes what was kept.

        Collectives: two all-gathers of small values.
        """
        if resume != "auto" and attempt_before(self._output) is None:
            self._forget()
            return None
        step = self.newest()
        return step if step is not None and step > start and self._is_of_this_run(step) else None

    def newest(self) -> int | None:
        """Return the last step of which the state of every rank is on some node; None where there is none.

        Collectives: one all-gather of names.
        """
        held = all_gather_json(sorted(self._here()))
        steps: dict[int, set[int]] = {}
        for listed in held:
            for step, rank in listed:
                steps.setdefault(step, set()).add(rank)
        return max((step for step, ranks in steps.items() if len(ranks) == self._world_size), default=None)

    def load(self, step: int) -> None:
        """Fill the run from the states of a step; ranks whose node has none are sent theirs.

        Args:
            step: From `newest`.

        Raises:
            CheckpointError: A state is damaged, or of another run; on all ranks.

        Collectives: two all-gathers of small values; a message for every state that is on another node.
        """
        here = self._here()
        data = here[step, self._rank].read_bytes() if (step, self._rank) in here else None
        held = all_gather_json([rank for at, rank in here if at == step])
        for rank in range(self._world_size):
            if rank in held[rank]:
                continue
            giver = next(other for other, ranks in enumerate(held) if rank in ranks)
            if self._rank == giver:
                _send(here[step, rank].read_bytes(), to=rank, group=self._group)
            elif self._rank == rank:
                data = _receive(come=giver, group=self._group)
        assert data is not None, "newest has found it"
        stored, problem = None, None
        try:
            stored = _decoded(data, self._record)
        except (CheckpointError, ValueError, KeyError) as error:
            problem = f"rank {self._rank}: {error}"
        problems = [each for each in all_gather_json(problem) if each is not None]
        if problems or stored is None:
            raise CheckpointError(f"the states of step {step} in {self._states}: {problems[0]}; remove that folder")
        self._run.rank_state.fill(stored)

    def _is_of_this_run(self, step: int) -> bool:
        """Return whether the states of a step are of this model, data and layout. Collectives: one all-gather."""
        here = self._here()
        own = [path for (at, _), path in here.items() if at == step]
        return all(all_gather_json(all(_record_of(path) == self._record for path in own)))

    def _here(self) -> dict[tuple[int, int], Path]:
        """Return the states of this world that are on this machine, by step and rank."""
        found = {}
        for path in self._states.glob("node-*/step-*"):
            parsed = _parsed(path)
            if parsed is not None and parsed[1] == self._world_size:
                found[parsed[0], parsed[2]] = path
        return found


def _token(output: Path) -> str:
    """Return the name of this run in the memory of nodes, which its folder keeps."""
    path = output / _TOKEN
    try:
        token = json.loads(path.read_text())["name"]
        if isinstance(token, str) and re.fullmatch(r"[0-9a-f]{16}", token):
            return token
    except (OSError, ValueError, LookupError, TypeError):
        pass
    token = os.urandom(8).hex()
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": token}))
    return token


def _name(step: int, world_size: int, rank: int) -> str:
    return f"step-{step}-of-{world_size}-rank-{rank}"


def _parsed(path: Path) -> tuple[int, int, int] | None:
    """Return step, world size and rank of a file's name; None for any other."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def _encoded(stored: StoredState, record: str) -> bytes:
    from safetensors.torch import save

    return save(dict(stored.tensors), metadata={"state": json.dumps(stored.state), "record": record})


def _decoded(data: bytes, record: str) -> StoredState:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        metadata = _metadata(data)
        tensors = load(data)
    except SafetensorError as error:
        raise CheckpointError(f"damaged: {error}") from error
    if metadata.get("record") != record:
        raise CheckpointError("of another run: another model, optimizer, data or layout")
    return StoredState(tensors=tensors, state=json.loads(metadata["state"]))


def _metadata(data: bytes) -> dict[str, str]:
    """Return the text beside the tensors: 8 bytes of length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise CheckpointError("damaged: it is shorter than its index")
    found: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return found


def _record_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(8)
            return _metadata(head + file.read(int.from_bytes(head, "little"))).get("record")
    except (OSError, ValueError, CheckpointError):
        return None


def _send(data: bytes, *, to: int, group: ProcessGroup | None) -> None:
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([len(data)]), to, group=group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, group=group)


def _receive(*, come: int, group: ProcessGroup | None) -> bytes:
    import torch
    import torch.distributed as dist

    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, come, group=group)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, come, group=group)
    return data.numpy().tobytes()


def _swapped(data: bytes, *, to: int, come: int, group: ProcessGroup | None) -> bytes:
    """Send to one rank and receive from another at once: every rank does, in a ring of nodes."""
    import torch
    import torch.distributed as dist

    length, other = torch.tensor([len(data)]), torch.zeros(1, dtype=torch.int64)
    sending = dist.isend(length, to, group=group)
    dist.recv(other, come, group=group)
    own, received = torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.empty(int(other), dtype=torch.uint8)
    content = dist.isend(own, to, group=group)
    dist.recv(received, come, group=group)
    for work in (sending, content):
        if work is not None:
            work.wait()
    return received.numpy().tobytes()
