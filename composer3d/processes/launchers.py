"""Rank and world of this process, by the variables of the launcher that started it.

torchrun and plain launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; Slurm, Open MPI and PMI
(MPICH, Intel MPI, Cray PALS) have names of their own, which are translated. A process whose variables contradict each
other, or say half of what is needed, is refused: the alternative is a world of its own in every process, all of which
write into one folder.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from composer3d.errors import RendezvousError

__all__ = ["Launch", "device_index", "find_launch", "join_launcher", "launch_id", "launch_round", "note_round"]

RUN_ID, RESTARTS, ROUND = "COMPOSER3D_RUN_ID", "COMPOSER3D_RESTART_COUNT", "COMPOSER3D_ROUND"

_PORTS = range(20000, 32000)  # below what Linux gives to outgoing connections


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Place of this process in its world, from the launcher.

    Args:
        launcher: Its name.
        rank: Of the world, from 0.
        world_size: Ranks of the job.
        local_rank: Among the job's processes on this machine; None where the launcher does not say.
        local_world_size: How many those are; None where it does not say.
        address: Of rank 0's machine; None where it does not say.
        port: There; None where it does not say.
        run_id: The job's name, the same on all ranks and no other job's; None where it has none.
        restarts: How often the job was started again under this name.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str | None = None
    port: str | None = None
    run_id: str | None = None
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Environment variables of a launcher, by what they state; of several names the first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]


_PLAIN = _Names(
    launcher="RANK and WORLD_SIZE",
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    job=("TORCHELASTIC_RUN_ID", RUN_ID),
)
# mpirun inside of a Slurm job starts its daemons by srun: the inner launcher's variables are this process's.
_OTHERS = (
    _Names(
        launcher="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names(
        launcher="PMI",
        rank=("PMI_RANK", "PALS_RANKID"),
        world_size=("PMI_SIZE", "PALS_SIZE"),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        job=("PMI_JOBID", "PALS_APID", "I_MPI_HYDRA_UUID"),
    ),
    # Of the step: what sbatch and salloc set for the whole job is no rank of anything.
    _Names(
        launcher="Slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(),
        job=("SLURM_JOB_ID",),
    ),
)


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return what the launcher of this process says of it; None for a process that nobody started as one of several.

    A world of one is none, unless torchrun made it: clusters set WORLD_SIZE=1 in every container.

    Args:
        environment: Of the process.

    Raises:
        RendezvousError: Variables contradict each other, are no numbers, or are half of what is needed.
    """
    if "TORCHELASTIC_RUN_ID" in environment and {"RANK", "WORLD_SIZE"} <= environment.keys():
        return _read(_PLAIN, environment, launcher="torchrun")
    translated = _translated(environment)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        plain = _read(_PLAIN, environment)
        if plain is not None and translated is not None:
            _refuse_contradiction(plain, translated)
        if plain is not None and plain.world_size > 1:
            _refuse_pods(environment)
            return plain
    if translated is not None and translated.world_size > 1:
        return translated
    _refuse_nodes(environment)
    return None


def join_launcher(environment: MutableMapping[str, str] = os.environ) -> Launch | None:
    """Translate what the launcher says into the variables that torch reads, where it has names of its own.

    A second call finds what the first has left.

    Args:
        environment: Of the process, to which the variables are added.

    Returns:
        What was found; None where this process is no rank.

    Raises:
        RendezvousError: As `find_launch`; or nobody says where the ranks meet.

    Collectives: none.
    """
    found = find_launch(environment)
    if found is None or found.launcher == "torchrun":
        return found
    address, port = _meeting_place(found, environment)
    stated = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        RUN_ID: found.run_id,
        RESTARTS: found.restarts,
    }
    environment.update({name: str(value) for name, value in stated.items() if value is not None})
    return found


def launch_id(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the name of the launch that this process belongs to, and how often it was started again.

    Args:
        environment: Of the process.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        return environment["TORCHELASTIC_RUN_ID"], int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return environment.get(RUN_ID, "alone"), int(environment.get(RESTARTS, "0"))


def note_round(environment: MutableMapping[str, str] = os.environ) -> None:
    """Give this world of torchrun a name of its own, where nodes may come and go.

    torchrun starts the ranks again without counting it where a node comes, and a node that comes late counts from 0.
    The port at which the ranks meet is the same on all of them, and another one in every world, unless torchrun's
    agents share a store: then no node comes late.

    Args:
        environment: Of the process, to which the name is added.
    """
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        environment[ROUND] = environment.get("MASTER_PORT", "")


def launch_round(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of this world among those of its launch; None where restarts are counted.

    Args:
        environment: Of the process.
    """
    return environment.get(ROUND) or None


def device_index(num_devices: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return which of this machine's accelerators is this process's.

    A launcher that shows each process one device of its own (`srun --gpus-per-task 1`) numbers it 0.

    Args:
        num_devices: Accelerators that this process sees.
        environment: Of the process.

    Raises:
        RendezvousError: Several ranks, several devices, and no local rank; or the local rank has no device.
    """
    if num_devices == 1:
        return 0
    found = find_launch(environment)
    if found is None:
        return int(environment.get("LOCAL_RANK", "0"))
    local = found.local_rank
    if local is None:
        if found.world_size > 1 and num_devices:
            raise RendezvousError(
                f"this machine shows {num_devices} accelerators, and the launcher does not say which of its processes "
                "this is; set LOCAL_RANK to its number among those of this machine, from 0"
            )
        return 0
    if 0 < num_devices <= local:
        raise RendezvousError(
            f"this is local rank {local} by {found.launcher}, and the machine shows {num_devices} accelerators; start "
            f"at most {num_devices} ranks on a machine"
        )
    return local


def _translated(environment: Mapping[str, str]) -> Launch | None:
    """Return what launchers with names of their own say of this process: the innermost one that is whole.

    `srun --mpi=pmi2` sets PMI's variables beside Slurm's, and fewer of them: no local rank, and no nodes.
    """
    read = [_read(names, environment) for names in _OTHERS if _first(names.rank, environment) is not None]
    found = [each for each in read if each is not None]
    alike = [each for each in found if (each.rank, each.world_size) == (found[0].rank, found[0].world_size)]
    return next((each for each in alike if each.local_rank is not None), alike[0]) if alike else None


def _read(names: _Names, environment: Mapping[str, str], launcher: str | None = None) -> Launch | None:
    """Return what one launcher says; None of one that is not whole and is no launcher's of ranks (`salloc`)."""
    rank, world_size = _first(names.rank, environment), _first(names.world_size, environment)
    if rank is None or world_size is None:
        if names is not _PLAIN:
            return None
        there, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        if there == "WORLD_SIZE" and environment[there] == "1":
            return None
        raise RendezvousError(f"{there}={environment[there]} is set, and {missing} is not; set both, or neither")
    local, local_size = _first(names.local_rank, environment), _first(names.local_world_size, environment)
    if names.launcher == "Slurm":
        local_size = _slurm_tasks_here(environment)
    found = Launch(
        launcher=launcher or names.launcher,
        rank=_number(rank),
        world_size=_number(world_size),
        local_rank=None if local is None else _number(local),
        local_world_size=None if local_size is None else _number(local_size),
        address=environment.get("MASTER_ADDR"),
        port=environment.get("MASTER_PORT"),
        run_id=_run_id(names, environment),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")) if names.launcher == "Slurm" else 0,
    )
    local_world = found.world_size if found.local_world_size is None else found.local_world_size
    fits = found.rank < found.world_size and local_world <= found.world_size
    if not fits or (found.local_rank is not None and found.local_rank >= local_world):
        raise RendezvousError(f"{found.launcher} states what cannot be: {_shown(names, environment)}")
    return found


def _first(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first of the variables that is set, with its value."""
    return next(((name, environment[name]) for name in names if name in environment), None)


def _number(stated: tuple[str, str]) -> int:
    name, value = stated
    if not re.fullmatch(r"\d{1,9}", value):
        raise RendezvousError(f'{name}="{value}" is no number of a rank; the launcher sets it, a script should not')
    return int(value)


def _shown(names: _Names, environment: Mapping[str, str]) -> str:
    every = (*names.rank, *names.world_size, *names.local_rank, *names.local_world_size)
    return ", ".join(f"{name}={environment[name]}" for name in every if name in environment)


def _run_id(names: _Names, environment: Mapping[str, str]) -> str | None:
    job = _first(names.job, environment)
    if job is None:
        return None
    if names.launcher != "Slurm":
        return re.sub(r"[^\w.-]", "_", job[1])
    return f"slurm-{job[1]}.{environment.get('SLURM_STEP_ID', '0')}"


def _slurm_tasks_here(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return how many tasks of the step are on this node: "4(x2),1" are 4, 4 and 1."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    node = environment.get("SLURM_NODEID", "")
    counts: list[str] = []
    for part in environment.get(name, "").split(","):
        count = re.fullmatch(r"(\d+)(?:\(x(\d{1,6})\))?", part)
        if count is None:
            return None
        counts += [count[1]] * int(count[2] or 1)
    return (name, counts[int(node)]) if node.isdigit() and int(node) < len(counts) else None


def _refuse_contradiction(plain: Launch, translated: Launch) -> None:
    """Refuse RANK and WORLD_SIZE that a script has set beside a launcher that says otherwise."""
    if (plain.rank, plain.world_size) == (translated.rank, translated.world_size):
        return
    if plain.world_size == 1 or translated.world_size == 1:
        return  # a container's, or a launcher that starts one process a machine for another inside
    raise RendezvousError(
        f"RANK={plain.rank} of WORLD_SIZE={plain.world_size}, and {translated.launcher} states rank {translated.rank} "
        f"of {translated.world_size}; unset RANK and WORLD_SIZE (a script that sets them before the launcher gives all "
        "processes the same), or start torchrun once a machine"
    )


def _refuse_pods(environment: Mapping[str, str]) -> None:
    """Refuse a container whose operator counts containers, while each is to start several ranks."""
    per_node = environment.get("PET_NPROC_PER_NODE", "1")
    if per_node != "1" and "LOCAL_RANK" not in environment:
        raise RendezvousError(
            f"PET_NPROC_PER_NODE={per_node}: the container is to start {per_node} ranks, and RANK counts containers; "
            "its command is torchrun -m composer3d run MANIFEST"
        )


def _refuse_nodes(environment: Mapping[str, str]) -> None:
    """Refuse a container of several that was made for torchrun, and runs without it."""
    nodes = environment.get("PET_NNODES", "1").split(":")[-1]
    if nodes != "1" and "TORCHELASTIC_RUN_ID" not in environment:
        raise RendezvousError(
            f"PET_NNODES={environment['PET_NNODES']}: the job has several containers, and each would train a world of "
            "its own; its command is torchrun -m composer3d run MANIFEST"
        )


def _meeting_place(found: Launch, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return address and port of the store that rank 0 serves.

    Raises:
        RendezvousError: Nobody says.
    """
    address, port = found.address, found.port
    if address is None and found.launcher == "Slurm":
        address = _slurm_address(environment)
    if address is None and found.local_world_size == found.world_size:
        address = "127.0.0.1"
    if port is None and found.run_id is not None:
        port = str(_PORTS[zlib.crc32(f"{found.run_id}-{found.restarts}".encode()) % len(_PORTS)])
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
    if address is None or port is None:
        raise RendezvousError(
            f"{found.launcher} states rank {found.rank} of {found.world_size}, and nobody says where the ranks meet; "
            f"set {' and '.join(missing)} to rank 0's machine and a free port there, the same on all ranks"
        )
    return address, port


def _slurm_address(environment: Mapping[str, str]) -> str | None:
    """Return the address of the step's first node, where task 0 runs; None where Slurm names no nodes."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    first = _first_node(nodes)
    try:
        socket.getaddrinfo(first, None)
        return first
    except OSError:
        pass  # a node's name need not be a host's
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", first], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    stated = re.search(r"\bNodeAddr=(\S+)", shown)
    return None if stated is None else stated[1]


def _first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list: "gpu[007-012,20],login" begins with gpu007."""
    head = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    return nodes if head is None else head[1] + (head[2] or "") + (head[3] or "")
