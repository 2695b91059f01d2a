"""The private names of torch that process groups, stores and launchers rest on."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.sockets import listening, listening_ports
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh

from composer3d import RankError, torch_compat
from composer3d.checkpoint import save
from composer3d.testing import fake_world, run_ranks


def test_lazy_modules_exist():
    for name in torch_compat.lazy_modules():
        assert importlib.import_module(name).__name__ == name


def test_a_fake_group_has_a_rank_and_a_size_and_meshes_make_the_groups_of_that_rank_alone():
    with torch_compat.fake_group(12, 5):
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("outer", "inner"))
        assert (dist.get_rank(), dist.get_world_size()) == (5, 12)
        assert sorted(map(dist.get_process_group_ranks, torch_compat.all_groups()), key=len) == [
            [1, 5, 9],
            [4, 5, 6, 7],
            list(range(12)),
        ]
        assert dist.get_process_group_ranks(mesh["inner"].get_group()) == [4, 5, 6, 7]
    assert not dist.is_initialized()


def test_meshes_of_a_fake_group_do_not_walk_over_the_groups_of_other_ranks(monkeypatch):
    before = vars(device_mesh.DeviceMesh)["_init_one_process_group"]
    asked = []
    with torch_compat.fake_group(24, 17), monkeypatch.context() as patched:
        make = device_mesh.new_group
        patched.setattr(device_mesh, "new_group", lambda **given: [asked.append(given["ranks"]), make(**given)][1])
        mesh = init_device_mesh("cpu", (3, 1, 4, 2), mesh_dim_names=("a", "b", "c", "d"))
        both = mesh["a", "c"]._flatten("both")
        assert asked == [[1, 9, 17], [17], [17, 19, 21, 23], [16, 17], [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]]
        assert [dist.get_process_group_ranks(mesh.get_group(name)) for name in "abcd"] == asked[:4]
        assert both.get_local_rank() == 8
    assert vars(device_mesh.DeviceMesh)["_init_one_process_group"] is before


def test_process_group_from_a_name_a_box_and_itself():
    boxes = []

    def handle(operator, types, args, kwargs):
        boxes.extend(arg for arg in args if isinstance(arg, torch.ScriptObject))
        return operator(*args, **kwargs)

    with fake_world(4, 2):
        group = dist.new_group([2, 3])
        with torch_compat.dispatch_mode(handle):
            dist.barrier(group)
        for argument in (group, group.group_name, boxes[0]):
            assert dist.get_process_group_ranks(torch_compat.process_group(argument)) == [2, 3]


def test_checkpoint_metadata_consists_of_the_named_classes(tmp_path):
    named = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    save(tmp_path / "step-1", tensors={"w": torch.zeros(2)}, state={})
    with (tmp_path / "step-1" / ".metadata").open("rb") as file:
        Recorder(file).load()
    # Python 3.11.0 to 3.11.3 pickle members of enumerations by getattr.
    enums = {("builtins", "getattr")} if sys.version_info < (3, 11, 4) else set()
    assert named - torch_compat.CHECKPOINT_METADATA_GLOBALS == {
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
        *enums,
    }
    for module, name in torch_compat.CHECKPOINT_METADATA_GLOBALS:
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0), (torch.float8_e4m3fn, 1)])
def test_a_tensor_is_saved_as_one_of_the_two_calls(dtype, number):
    buffer = io.BytesIO()
    torch.save(torch.zeros(2, dtype=dtype), buffer)
    module, _, name = torch_compat.CHECKPOINT_REBUILDS[number].rpartition(".")
    assert f"{module}\n{name}\n".encode() in buffer.getvalue()


def test_a_parameter_is_saved_by_its_call():
    buffer = io.BytesIO()
    torch.save(torch.nn.Parameter(torch.zeros(2)), buffer)
    module, _, name = torch_compat.CHECKPOINT_PARAMETER.rpartition(".")
    assert f"{module}\n{name}\n".encode() in buffer.getvalue()


def test_the_place_of_a_shard_has_its_name():
    module, _, name = torch_compat.CHECKPOINT_STORAGE_INFO.rpartition(".")
    assert (module, name) in torch_compat.CHECKPOINT_METADATA_GLOBALS
    assert isinstance(getattr(importlib.import_module(module), name), type)


def four():
    return 4


def test_the_local_agent_shows_its_ranks_and_is_looked_at():
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    pids, looks = {}, []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "here", 1, 1, "localhost"))
    spec = WorkerSpec("rank", 1, handler, entrypoint=four, max_restarts=0, monitor_interval=0.01)
    agent = torch_compat.local_agent(
        spec, "fork", started=pids.update, look=lambda: looks.append(1), failed=lambda codes: None
    )
    try:
        assert agent.run().return_values == {0: 4}
    finally:
        handler.shutdown()
        for number, previous in before.items():
            signal.signal(number, previous)
    assert list(pids) == [0] and looks


def wait_for_nobody():
    group = dist.new_group([0, 1])
    torch_compat.set_group_timeout(group, timedelta(milliseconds=200))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
    torch_compat.set_group_timeout(None, timedelta(seconds=30))
    dist.barrier()
    return str(caught.value) if dist.get_rank() == 0 else None


def test_a_group_s_timeout_can_be_set_after_it_was_made():
    told, _ = run_ranks(wait_for_nobody, 2)
    assert "timed out waiting 200ms" in told.lower()


def exchange():
    store, rank = torch_compat.default_store(), dist.get_rank()
    store.set(f"number/{rank}", str(rank * 10))
    group = dist.new_group()
    assert torch_compat.all_groups() == [dist.group.WORLD, group]
    dist.barrier(group)  # a group that one rank has left could not be joined by the other
    dist.destroy_process_group(group)
    assert torch_compat.all_groups() == [dist.group.WORLD]
    return [int(store.get(f"number/{other}")) for other in range(2)]


def test_the_default_store_is_that_of_all_ranks_and_groups_are_listed():
    assert run_ranks(exchange, 2) == [[0, 10], [0, 10]]


def recorded():
    before = time.time_ns()  # the recorder is the process's, and ranks are forked with what their parent's holds
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(5, 2), group=mesh.get_group("b"))
    names = [torch_compat.group_name(group) for group in (None, mesh.get_group("b"))]
    rows = [
        (entry["process_group"][0], entry["input_sizes"])
        for entry in torch_compat.flight_records()
        if entry["time_created_ns"] >= before
    ]
    return (
        rows == [(names[0], [[3]]), (names[1], [[5, 2]])]
        and torch_compat.flight_records(waiting=True) == []
        and torch_compat.ranks_of_group(names[0]) == (0, 1, 2, 3)
        and torch_compat.ranks_of_group(names[1]) == ((0, 1) if dist.get_rank() < 2 else (2, 3))
        and torch_compat.ranks_of_group("none of them") is None
        and {
            "collective_seq_id",
            "input_dtypes",
            "is_p2p",
            "profiling_name",
            "record_id",
            "retired",
            "state",
            "time_created_ns",
            "timeout_ms",
        }
        <= torch_compat.flight_records()[0].keys()
    )


def test_flight_records_hold_collectives_by_the_names_of_their_groups():
    assert run_ranks(recorded, 4) == [True] * 4


def test_tensors_are_gathered_under_either_name():
    def gathered():
        output = torch.empty(4)
        torch_compat.all_gather_single(output, torch.full((2,), float(dist.get_rank())), group=dist.group.WORLD)
        return output.tolist()

    assert run_ranks(gathered, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_tensors_are_summed_and_scattered_under_either_name():
    def scattered():
        output = torch.empty(2)
        torch_compat.reduce_scatter_single(output, torch.arange(4.0) + dist.get_rank(), group=dist.group.WORLD)
        return output.tolist()

    assert run_ranks(scattered, 2) == [[1.0, 3.0], [5.0, 7.0]]


def timeouts_of_axes():
    torch_compat.set_group_timeout(None, timedelta(seconds=70))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group, other = mesh.get_group("a"), mesh.get_group("b")
    torch_compat.inherit_timeouts(group)
    return [torch_compat.group_timeout(one, torch.device("cpu")) for one in (dist.group.WORLD, group, other)]


def test_the_timeouts_of_a_mesh_are_not_the_worlds_until_they_are_inherited():
    minute = timedelta(seconds=70)
    assert run_ranks(timeouts_of_axes, 4) == [[minute, minute, timedelta(minutes=30)]] * 4


def test_a_backend_without_a_timeout_has_none():
    with fake_world(2):
        assert torch_compat.group_timeout(dist.group.WORLD, torch.device("cpu")) is None


def listening_gloo(folder):
    """Return what two groups of one address reduce, and where this process listens since it was forked."""
    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=60)
    inherited = listening_ports()  # of a server that an earlier test of this worker is still closing
    group = torch_compat.gloo_at("127.0.0.3", dist.FileStore(f"{folder}/store", 2), rank, 2, timeout=timeout)
    total = torch.tensor([rank + 1.0])
    group.allreduce([total]).wait()
    return total.item(), listening(but=inherited)


def test_a_gloo_group_listens_on_the_address_it_is_given(tmp_path):
    assert run_ranks(listening_gloo, 2, str(tmp_path), init=False) == [(3.0, ["127.0.0.3"])] * 2


def test_a_lone_rendezvous_is_complete_at_once_and_its_store_is_memory():
    rendezvous = torch_compat.lone_rendezvous("here")
    found = rendezvous.next_rendezvous()
    assert (found.rank, found.world_size, rendezvous.get_run_id()) == (0, 1, "here")
    assert isinstance(found.store, dist.HashStore)
    assert not rendezvous.use_agent_store and not rendezvous.is_closed() and rendezvous.num_nodes_waiting() == 0


def mismatched(folder):
    """Reduce tensors of two sizes; the rank that receives more than it expects is asked before it aborts."""
    rank = dist.get_rank()

    def answer():
        (Path(folder) / f"answered-{rank}").write_text(threading.current_thread().name)

    def never():
        raise AssertionError("was taken away")

    torch_compat.on_mismatched_size(never)()
    torch_compat.on_mismatched_size(answer)
    dist.all_reduce(torch.ones(5 if rank == 0 else 5000))


def test_a_message_of_another_size_is_announced_before_the_process_ends(tmp_path):
    with pytest.raises(RankError, match="rank 0 of 2 failed: killed by SIGABRT"):
        run_ranks(mismatched, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["answered-0"]
    assert (tmp_path / "answered-0").read_text().startswith("Dummy-")
