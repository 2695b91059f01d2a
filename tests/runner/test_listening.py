"""Nothing of a world on one machine listens beyond loopback, and ranks of the launcher meet in a private folder."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.doctor_cases import may_mount

from composer3d.errors import RendezvousError
from composer3d.processes.forking import limit_ranks
from composer3d.processes.rendezvous import LAUNCH, keep_to_loopback, meeting_point
from composer3d.runner.launching.launcher import launch_local

CASES = Path(__file__).with_name("listening_cases.py")
TESTS = Path(__file__).parent.parent


def listeners(output, *cases):
    """Return what cases printed, of a process for which this machine's name is not loopback's first address."""
    if not may_mount():
        pytest.skip("needs to mount a file over /etc/hosts, in a namespace of its own")
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    # Each case takes room for its ranks itself: a caller that held some while a case waits for more would wait for ever
    # as soon as another test is next in the queue and needs all there is.
    done = subprocess.run(
        [sys.executable, str(CASES), str(output), *cases],
        env=inherited | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,  # with the wait for room
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^== (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    lines = {case: text.splitlines() for case, text in zip(parts[::2], parts[1::2], strict=True)}
    return {case: [json.loads(line) for line in text if line.startswith("{")] for case, text in lines.items()}


def test_what_a_machine_starts_by_itself_listens_on_loopback_alone(tmp_path):
    rank = {"rank": ["127.0.0.1"], "parent": []}
    assert listeners(tmp_path, "local", "ranks", "served", "plain") == {
        "local": [rank, rank],
        "ranks": [rank, rank],
        "served": [{"rank": ["127.0.0.7"], "parent": []}],  # MASTER_ADDR
        "plain": [rank],
    }


def test_ranks_of_torchrun_on_one_machine_listen_on_loopback_alone(tmp_path):
    found = listeners(tmp_path, "torchrun")
    assert [rank["rank"] for rank in found["rank"]] == [["127.0.0.1"], ["127.0.0.1"]]


def test_an_address_of_another_machine_is_refused_by_the_first_rank(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    from datetime import timedelta

    with pytest.raises(RendezvousError) as caught:
        meeting_point(timedelta(seconds=5))
    assert str(caught.value) == (
        "MASTER_ADDR=192.0.2.1 MASTER_PORT=29400: rank 0 cannot listen there ([Errno 99] Cannot assign requested "
        "address); give the address of rank 0's machine by which the others reach it, and a free port"
    )


@pytest.mark.parametrize(
    ("local", "kept"), [("2", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}), ("1", {})]
)
def test_interfaces_are_chosen_where_one_machine_has_all_ranks_and_given_back(monkeypatch, local, kept):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    release = keep_to_loopback()
    assert {name: value for name, value in os.environ.items() if name.endswith("_SOCKET_IFNAME")} == kept
    release()
    assert not [name for name in os.environ if name.endswith("_SOCKET_IFNAME")]


def test_an_interface_that_is_named_is_kept_where_the_launcher_is_not_ours(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    keep_to_loopback()()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def rounds_of_worlds():
    """Join and leave three worlds; return the private folder, what its mode is, and what was reduced."""
    import torch
    import torch.distributed as dist

    from composer3d.processes.process_group import join_world

    sums = []
    for number in range(3):
        release = join_world(torch.device("cpu"))
        total = torch.tensor(float(number + dist.get_rank()))
        dist.all_reduce(total)
        sums.append(total.item())
        release()
    private = Path(os.environ[LAUNCH])
    return str(private), stat.S_IMODE(private.stat().st_mode), sums


def test_ranks_meet_in_a_private_folder_as_often_as_they_like(tmp_path):
    with limit_ranks(2):
        result = launch_local(rounds_of_worlds, num_ranks=2, device="cpu", output=tmp_path)
    assert result.ok, result.report.render()
    for private, mode, sums in result.values.values():
        assert (mode, sums) == (0o700, [1.0, 3.0, 5.0])
        assert not Path(private).exists()
