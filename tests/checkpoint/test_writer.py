from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from composer3d.checkpoint import AsyncSaver, contents, latest, load, read_state, read_tensor, read_tensors, save
from composer3d.errors import CheckpointError
from composer3d.testing import run_ranks


def full(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_tensors(path, list(contents(path))))


def error_of(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def test_a_save_is_loaded_in_place(tmp_path):
    weight = nn.Parameter(torch.randn(3, 2))
    strided = torch.randn(4, 6)[:, ::2]
    save(tmp_path / "runs" / "step-1", tensors={"w": weight, "s": strided}, state={"step": 1})
    target = nn.Parameter(torch.zeros(3, 2))
    sink = torch.zeros(4, 6)
    state = load(tmp_path / "runs" / "step-1", tensors={"w": target, "s": sink[:, ::2]})
    assert state == {"step": 1}
    assert torch.equal(target, weight)
    assert torch.equal(sink[:, ::2], strided) and torch.equal(sink[:, 1::2], torch.zeros(4, 3))
    assert target.requires_grad and target.grad_fn is None


def test_a_slice_does_not_drag_its_storage_along(tmp_path):
    save(tmp_path / "step-1", tensors={"w": torch.zeros(1_000_000)[:3]}, state={})
    assert sum(file.stat().st_size for file in (tmp_path / "step-1").iterdir()) < 10_000


def test_saving_again_replaces(tmp_path):
    save(tmp_path / "step-1", tensors={"a": torch.zeros(2), "b": torch.zeros(2)}, state={"version": 1})
    save(tmp_path / "step-1", tensors={"a": torch.ones(3)}, state={"version": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert read_state(latest(tmp_path)) == {"version": 2}
    assert {key: tensor.tolist() for key, tensor in full(tmp_path / "step-1").items()} == {"a": [1, 1, 1]}


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": [1, 2]}, "w is a list, not a tensor; it belongs into the state"),
        ({"w": torch.empty(2, device="meta")}, "w is on the meta device and has no values to save"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, tensors, text):
    path = tmp_path / "step-1"
    assert error_of(lambda: save(path, tensors=tensors, state={})) == f"{path}: {text}"
    assert list(tmp_path.iterdir()) == []


def test_tensor_subclasses_are_refused(tmp_path):
    class Scaled(torch.Tensor):
        pass

    path = tmp_path / "step-1"
    text = error_of(lambda: save(path, tensors={"w": torch.zeros(2).as_subclass(Scaled)}, state={}))
    assert text == f"{path}: w is a Scaled; save the plain tensors of which it consists"


def layouts(folder):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    generator = torch.Generator().manual_seed(0)
    source = {name: torch.randn(5, 3, generator=generator) for name in ("rows", "columns", "replicated", "plain")}
    tensors = {
        "rows": distribute_tensor(source["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(source["columns"], mesh, [Shard(1)]),
        "replicated": distribute_tensor(source["replicated"], mesh, [Replicate()]),
        "plain": source["plain"],
        f"rank-{rank}": torch.full((2,), float(rank)),
    }
    expected = {name: tensor.clone() for name, tensor in source.items()}
    save(folder / "step-1", tensors=tensors, state={"rank": rank})
    saver = AsyncSaver()
    saver.save(folder / "step-2", tensors=tensors, state={"rank": rank})
    for tensor in tensors.values():
        tensor.zero_()
    saver.close()
    return expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_replicas_and_keys_of_one_rank(tmp_path, world_size):
    source = run_ranks(layouts, world_size, tmp_path)[0]
    expected = source | {f"rank-{rank}": torch.full((2,), float(rank)) for rank in range(world_size)}
    for name in ("step-1", "step-2"):
        held = full(tmp_path / name)
        assert set(held) == set(expected)
        assert all(torch.equal(held[key], expected[key]) for key in expected)
        assert read_state(tmp_path / name) == {"rank": 0}
    assert latest(tmp_path) == tmp_path / "step-2"
    size = sum(file.stat().st_size for file in (tmp_path / "step-1").glob("*.distcp"))
    assert size == sum(file.stat().st_size for file in (tmp_path / "step-2").glob("*.distcp"))


def partial(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return error_of(lambda: save(folder / "step-1", tensors={"w": tensor}, state={}))


def test_unreduced_tensors_are_refused(tmp_path):
    for text in run_ranks(partial, 2, tmp_path):
        assert text.startswith(f"{tmp_path / 'step-1'}: w is a DTensor with unreduced placements (Partial(sum),)")


def one_rank_fails(folder, asynchronous):
    rank = dist.get_rank()

    def write(name, size, state):
        saver = AsyncSaver() if asynchronous else None
        tensors = {f"w{rank}": torch.ones(size)}
        if saver is None:
            save(folder / name, tensors=tensors, state=state)
        else:
            saver.save(folder / name, tensors=tensors, state=state)
            saver.close()

    write("step-1", 4, {})
    texts = [error_of(lambda: write("step-2", 4, {"bad": {1}}))]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))
    texts.append(error_of(lambda: write("step-1", 4_000, {})))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(os.listdir(folder))
    write("step-2", 5, {})
    return texts, left if rank == 0 else None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_what_was_saved(tmp_path, asynchronous):
    results = run_ranks(one_rank_fails, 3, tmp_path, asynchronous)
    assert results[0][0] == results[1][0] == results[2][0]
    (bad_state, full_disk), left = results[0]
    assert bad_state == (
        f"{tmp_path / 'step-2'}: rank 0: state.bad is a set, which JSON cannot carry; make it a string, number, bool, "
        "list or dict, or save it among the tensors"
    )
    assert full_disk == f"{tmp_path / 'step-1'}: rank 1: OSError: [Errno 27] File too large"
    assert left == ["latest", "step-1"]
    assert read_tensor(tmp_path / "step-1", "w1").tolist() == [1, 1, 1, 1]
    assert contents(latest(tmp_path))["w2"].shape == (5,)


def test_async_saves_what_was_there_when_it_was_called(tmp_path):
    saver = AsyncSaver()
    weight, state = torch.zeros(3), {"n": [0]}
    for step in range(4):
        saver.save(tmp_path / f"step-{step}", tensors={"w": weight}, state=state)
        weight += 1
        state["n"][0] += 1
    saver.wait()
    saver.wait()
    for step in range(4):
        assert read_tensor(tmp_path / f"step-{step}", "w").tolist() == [step] * 3
        assert read_state(tmp_path / f"step-{step}") == {"n": [step]}
    saver.close()


@pytest.mark.parametrize("later", ["save", "wait", "close"])
def test_an_async_error_surfaces_at_the_next_call_once(tmp_path, later):
    saver = AsyncSaver()
    saver.save(tmp_path / "latest", tensors={}, state={})
    calls = {
        "save": lambda: saver.save(tmp_path / "step-2", tensors={"w": torch.ones(2)}, state={}),
        "wait": saver.wait,
        "close": saver.close,
    }
    reserved = f'{tmp_path / "latest"}: a checkpoint cannot have this name; use for example "step-100"'
    assert error_of(calls[later]) == reserved
    assert latest(tmp_path) is None
    if later != "close":
        calls["save"]()
        saver.close()
        assert latest(tmp_path) == tmp_path / "step-2"


def test_nothing_of_a_save_is_left_after_it(tmp_path):
    # A thread that lets go of a process group while Python ends is ended within C++, which aborts the process.
    def hold(frame, event, arg):
        if event == "return" and frame.f_code.co_name == "_fulfil":  # it has told that it is done
            threading.Event().wait(0.1)

    saver = AsyncSaver()
    threading.setprofile(hold)
    try:
        saver.save(tmp_path / "step-1", tensors={"w": torch.ones(3)}, state={})
    finally:
        threading.setprofile(None)
    saver.close()
    assert "composer3d-checkpoint" not in {thread.name for thread in threading.enumerate()}
    assert read_tensor(tmp_path / "step-1", "w").tolist() == [1, 1, 1]


NEVER_CLOSED = """
import sys
from pathlib import Path
import torch
from torch import distributed as dist
from composer3d.checkpoint import AsyncSaver
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
saver = AsyncSaver()
saver.save(Path(sys.argv[1]), tensors={"w": torch.ones(3)}, state={})
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("raise OSError('no more data')", 1)])
def test_a_save_that_nobody_waits_for_is_done_before_the_process_ends(tmp_path, ending, code):
    command = [sys.executable, "-c", NEVER_CLOSED + ending, str(tmp_path / "step-1")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.rpartition("OSError: ")[2]) == (code, "no more data\n" if ending else "")
    assert read_tensor(tmp_path / "step-1", "w").tolist() == [1, 1, 1]


FORKED = """
import os
import sys
import threading
from pathlib import Path
import torch
from composer3d.checkpoint import AsyncSaver, saving
begin, write = threading.Event(), saving._write
saving._write = lambda *arguments: (begin.wait(), write(*arguments))
saver = AsyncSaver()
saver.save(Path(sys.argv[1]), tensors={"w": torch.ones(3)}, state={})
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
begin.set()
"""


def test_a_fork_does_not_wait_for_the_save_of_its_parent(tmp_path):
    # Python 3.12 warns of every fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, str(tmp_path / "step-1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
    assert read_tensor(tmp_path / "step-1", "w").tolist() == [1, 1, 1]


def left():
    """Close a save that waits for a rank which never joins it; return the seconds that took."""
    saver, begun = AsyncSaver(), time.monotonic()
    if dist.get_rank() == 0:
        saver.save(Path("/nowhere/step-1"), tensors={}, state={})
        begun = time.monotonic()
        saver.close(at_most_s=0.2)
    else:
        dist.new_group(backend="gloo")  # what the other's first save makes, and no more
    return time.monotonic() - begun


def test_a_save_that_waits_for_a_rank_that_hangs_does_not_keep_the_others_from_their_end():
    assert run_ranks(left, 2)[0] < 250  # without a limit it would wait for ever
