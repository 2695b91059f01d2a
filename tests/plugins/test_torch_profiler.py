from __future__ import annotations

import gzip
import json
from functools import partial

import pytest
from support.models import assert_unchanged, composed
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"


def table(folder, more=""):
    return f'[profiling.torch_profiler]\nfolder = "{folder}"\nwait = 1\nwarmup = 1\nactive = 1\n{more}\n'


def load(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


@pytest.mark.filterwarnings("ignore:Profiler won.t be using warmup")
def test_gradients_equal_one_device_and_collectives_stay(tmp_path):
    text = f'[profiling.torch_profiler]\nfolder = "{tmp_path}"\nwait = 0\nwarmup = 0\nactive = 1\n'
    assert_unchanged(2, FSDP, text)
    assert load(tmp_path / "all-ranks.json.gz")


def test_all_ranks_are_in_one_trace(tmp_path):
    run_ranks(partial(train, steps=4), 2, FSDP + table(tmp_path, "ranks = [0, 1]"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all-ranks.json.gz",
        "rank-0-cycle-0.json.gz",
        "rank-1-cycle-0.json.gz",
    ]
    events = load(tmp_path / "all-ranks.json.gz")
    ranges = [event for event in events if event.get("name", "").startswith("composer3d.") and event["ph"] == "X"]
    for rank in (0, 1):
        names = [event["name"] for event in ranges if event["pid"] == rank and event.get("cat") == "user_annotation"]
        # One active step of two micro-batches.
        assert names.count("composer3d.step") == 1 and names.count("composer3d.optimizer") == 1
        assert [names.count(f"composer3d.forward microbatch={n}") for n in (0, 1)] == [1, 1]
        assert [names.count(f"composer3d.block layers.{n}") for n in range(3)] == [2, 2, 2]
        assert names.count("composer3d.reduce_scatter axis=dp_shard") == 8
    steps = [event for event in ranges if event["name"] == "composer3d.step"]
    # The ranks ran the same step at the same time.
    assert max(event["ts"] for event in steps) < min(event["ts"] + event["dur"] for event in steps)


def test_cycles_and_tensorboards_folder(tmp_path):
    run_ranks(partial(train, steps=7), 1, table(tmp_path / "a", "repeat = 2"))
    assert sorted(path.name for path in (tmp_path / "a").glob("rank-*")) == [
        "rank-0-cycle-0.json.gz",
        "rank-0-cycle-1.json.gz",
    ]
    run_ranks(partial(train, steps=4), 1, table(tmp_path / "b", "tensorboard = true"))
    (path,) = (tmp_path / "b").iterdir()
    assert path.name.startswith("rank-0.") and path.name.endswith(".pt.trace.json")


def pushed(text):
    """Train on a GPU; return the NVTX ranges that were opened, and how many were closed."""
    import torch

    labels, num_closed, push, pop = [], 0, torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def pushing(label):
        labels.append(label)
        return push(label)

    def popping():
        nonlocal num_closed
        num_closed += 1
        return pop()

    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = pushing, popping
    train(text, steps=4)
    return labels, num_closed


@pytest.mark.gpu
def test_kernels_are_in_the_trace_and_ranges_go_to_nsight(tmp_path):
    ((labels, num_closed),) = run_ranks(pushed, 1, table(tmp_path, "nvtx = true"), backend="cpu:gloo,cuda:nccl")
    assert len(labels) == num_closed and labels.count("composer3d.step") == 4
    assert labels.count("composer3d.block layers.1") == 4 * 2
    events = load(tmp_path / "all-ranks.json.gz")
    assert any(event.get("cat") == "kernel" for event in events)


def test_nothing_is_written_outside_a_run(tmp_path):
    run_ranks(lambda: composed(table(tmp_path / "none"), purpose="verify").close(), 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("ranks = [0, 2]", "ranks names 2, and the world has the ranks 0 to 0; take it out"),
        ("nvtx = true", "nvtx needs CUDA, and this run is on cpu; take it out"),
    ],
)
def test_refusals(tmp_path, more, message):
    def refused():
        with pytest.raises(ManifestError) as caught:
            composed(table(tmp_path, more))
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith(f"[profiling.torch_profiler] {message}")
