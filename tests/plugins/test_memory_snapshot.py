from __future__ import annotations

import json
import os
import pickle
import signal
from functools import partial

import pytest
import torch
from support.models import Net, assert_unchanged, composed, mine, padded, seeded

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"


def table(folder, more=""):
    return f'[profiling.memory_snapshot]\nfolder = "{folder}"\n{more}\n'


def train(text, folder, more="", inside=None, error=None):
    run = composed(text + table(folder, more), seeded())
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens, targets = padded()
    kept = torch.ones(1000, 50)
    for number in range(3):
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            optimizer.step()
            if inside is not None and number == 1:
                inside()
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for _, p in run.named_parameters())
    run.close(error)
    return local, kept.nbytes, signal.getsignal(signal.SIGUSR2)


def test_gradients_equal_one_device_and_collectives_stay(tmp_path):
    assert_unchanged(2, FSDP, table(tmp_path, "steps = [0]"))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("text", "world_size"), [("", 1), (FSDP, 2)])
def test_what_a_rank_holds(tmp_path, text, world_size):
    results = run_ranks(train, world_size, text, tmp_path, "steps = [1]")
    for rank, (local, kept, _) in enumerate(results):
        found = json.loads((tmp_path / f"rank-{rank}-step-1.json").read_text())
        # The gradients are those of the local parameters; AdamW has two tensors a parameter and a step count.
        num_parameters = len(list(Net().parameters()))
        if world_size == 1:
            assert found["bytes"]["parameters"] == found["bytes"]["gradients"] == 4 * local
            assert found["bytes"]["optimizer"] == 2 * 4 * local + 4 * num_parameters
        # FSDP2 pads uneven shards.
        assert 4 * local <= found["bytes"]["parameters"] <= 4 * local + 4 * 40 * num_parameters
        assert {"bytes": kept, "tensor": "(1000, 50) float32"} in found["largest_others"]
        assert found["resident_bytes"] > 10**7 and found["error"] is None


def test_on_a_signal(tmp_path):
    ask = lambda: os.kill(os.getpid(), signal.SIGUSR2)  # noqa: E731
    ((_, _, handler),) = run_ranks(partial(train, inside=ask), 1, "", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-step-1.json"] and handler == signal.SIG_DFL


def exhausted():
    """Return the error of an allocation that no machine can serve."""
    try:
        torch.empty(2**48, dtype=torch.uint8)
    except RuntimeError as error:
        return error


def test_when_memory_ran_out(tmp_path):
    run_ranks(lambda: train("", tmp_path, error=exhausted()), 1)
    found = json.loads((tmp_path / "rank-0-step-2-out-of-memory.json").read_text())
    assert "DefaultCPUAllocator" in found["error"]
    run_ranks(lambda: train("", tmp_path / "other", error=RuntimeError("another")), 1)
    assert not (tmp_path / "other").exists()


@pytest.mark.gpu
def test_the_allocators_history_is_written_beside(tmp_path):
    run_ranks(train, 1, "", tmp_path, "steps = [1]\nhistory = 1000", backend="cpu:gloo,cuda:nccl")
    found = json.loads((tmp_path / "rank-0-step-1.json").read_text())
    assert found["allocator"]["allocated_bytes.all.current"] > 0 and found["bytes"]["parameters"] > 0
    history = pickle.loads((tmp_path / "rank-0-step-1.pickle").read_bytes())
    assert any(trace["action"] == "alloc" for trace in history["device_traces"][0])


def test_refuses_history_without_cuda(tmp_path):
    def refused():
        with pytest.raises(ManifestError) as caught:
            composed(table(tmp_path, "history = 10"))
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith(
        "[profiling.memory_snapshot] history records CUDA's allocator, and this run is on cpu; take it out"
    )
