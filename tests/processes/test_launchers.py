"""Who a process is, by the variables of every launcher, and which of them are refused."""

import socket

import pytest

from composer3d.errors import RendezvousError
from composer3d.processes import device_index, find_launch, join_launcher, launch_id

RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "localhost,other",
}
SHELL_OF_SALLOC = SLURM | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
TORCHRUN = RANK | ADDRESS | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("torchrun", TORCHRUN),
        ("torchrun", TORCHRUN | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),  # one a node, by srun
        ("RANK and WORLD_SIZE", RANK | ADDRESS),
        ("RANK and WORLD_SIZE", RANK | ADDRESS | SLURM),
        ("Slurm", SLURM),
        ("Slurm", SLURM | {"WORLD_SIZE": "1", "RANK": "0"}),  # as a container's image sets them
        ("Open MPI", OPEN_MPI | ADDRESS),
        ("Open MPI", OPEN_MPI | ADDRESS | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),  # its daemons'
        ("Slurm", SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "17.0"}),  # srun --mpi=pmi2
        ("Slurm", SLURM | {"PALS_RANKID": "3", "PALS_APID": "17"}),  # srun --mpi=cray_shasta, which states no size
        ("PMI", HYDRA | ADDRESS),
        ("PMI", PALS | ADDRESS),
    ],
)
def test_every_launcher_says_which_rank_this_is(launcher, environment):
    environment = dict(environment)
    found = find_launch(environment)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == (launcher, 3, 4, 1)
    assert found.local_world_size == 2
    join_launcher(environment)
    if launcher != "Slurm":
        assert {name: environment[name] for name in RANK | ADDRESS} == RANK | ADDRESS
    again = find_launch(environment)
    assert (again.rank, again.world_size, again.local_rank) == (3, 4, 1)


def test_a_slurm_step_meets_on_its_first_node():
    environment = dict(SLURM)
    join_launcher(environment)
    assert {name: environment[name] for name in RANK} == RANK
    assert environment["MASTER_ADDR"] == "localhost"
    assert 20000 <= int(environment["MASTER_PORT"]) < 32000
    assert launch_id(environment) == ("slurm-17.0", 0)
    ports = set()
    for step, restarts in (("0", "0"), ("1", "0"), ("0", "1")):
        other = SLURM | {"SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": restarts}
        join_launcher(other)
        ports.add(other["MASTER_PORT"])
    assert len(ports) == 3  # a step beside it, and the job when it was requeued, have stores of their own


@pytest.mark.parametrize(
    ("counts", "node", "expected"),
    [("2(x2)", "1", 2), ("4(x2),1", "2", 1), ("4,2,4", "1", 2), ("4", "3", None), ("many", "0", None)],
)
def test_tasks_of_a_slurm_node(counts, node, expected):
    step = {"SLURM_STEP_NUM_TASKS": "10", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": counts}
    assert find_launch(SLURM | step | {"SLURM_NODEID": node}).local_world_size == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n[1-2]", "n1"), ("gpu[007-012,20],login", "gpu007"), ("a-b.c,d", "a-b.c"), ("r[3]n[1-4]", "r3n"), ("x", "x")],
)
def test_the_first_of_a_slurm_node_list(nodes, first, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    environment = SLURM | {"SLURM_STEP_NODELIST": nodes}
    join_launcher(environment)
    assert environment["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        SHELL_OF_SALLOC,
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the script of sbatch
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_process_alone_is_no_rank(environment):
    assert find_launch(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "3"}, "RANK=3 is set, and WORLD_SIZE is not; set both, or neither"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, and RANK is not; set both, or neither"),
        (
            RANK | {"RANK": "first"},
            'RANK="first" is no number of a rank; the launcher sets it, a script should not',
        ),
        (
            RANK | {"RANK": "4"},
            "RANK and WORLD_SIZE states what cannot be: RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2",
        ),
        (
            RANK | {"LOCAL_RANK": "2"},
            "RANK and WORLD_SIZE states what cannot be: RANK=3, WORLD_SIZE=4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2",
        ),
        (
            RANK | {"LOCAL_WORLD_SIZE": "8"},
            "RANK and WORLD_SIZE states what cannot be: RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=8",
        ),
        (
            SLURM | ADDRESS | {"RANK": "0", "WORLD_SIZE": "4"},
            "RANK=0 of WORLD_SIZE=4, and Slurm states rank 3 of 4; unset RANK and WORLD_SIZE (a script that sets them "
            "before the launcher gives all processes the same), or start torchrun once a machine",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"} | ADDRESS,
            "PET_NPROC_PER_NODE=8: the container is to start 8 ranks, and RANK counts containers; its command is "
            "torchrun -m composer3d run MANIFEST",
        ),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1"},
            "PET_NNODES=2: the job has several containers, and each would train a world of its own; its command is "
            "torchrun -m composer3d run MANIFEST",
        ),
        (
            OPEN_MPI,
            "Open MPI states rank 3 of 4, and nobody says where the ranks meet; set MASTER_ADDR and MASTER_PORT to "
            "rank 0's machine and a free port there, the same on all ranks",
        ),
        (
            RANK | {"MASTER_ADDR": "node0"},
            "RANK and WORLD_SIZE states rank 3 of 4, and nobody says where the ranks meet; set MASTER_PORT to rank 0's "
            "machine and a free port there, the same on all ranks",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(environment, message):
    with pytest.raises(RendezvousError) as refused:
        join_launcher(dict(environment))
    assert str(refused.value) == message


def test_ranks_of_one_machine_meet_on_loopback():
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-here-1@1"}
    join_launcher(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert launch_id(environment) == ("prterun-here-1_1", 0)
    environment = HYDRA | {"MPI_LOCALNRANKS": "4", "I_MPI_HYDRA_UUID": "ad29-0000"}  # Intel MPI's
    join_launcher(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert launch_id(environment) == ("ad29-0000", 0)


def test_a_device_is_known_from_the_environment_and_never_guessed():
    assert device_index(8, TORCHRUN) == 1
    assert device_index(8, SLURM) == 1
    assert device_index(1, SLURM) == 0  # each task sees a device of its own
    assert device_index(8, {}) == 0
    unknown = {name: value for name, value in (RANK | ADDRESS).items() if not name.startswith("LOCAL")}
    with pytest.raises(RendezvousError, match="shows 8 accelerators, and the launcher does not say which"):
        device_index(8, unknown)
    with pytest.raises(RendezvousError, match="local rank 3 by Slurm, and the machine shows 2 accelerators"):
        device_index(2, SLURM | {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"})
