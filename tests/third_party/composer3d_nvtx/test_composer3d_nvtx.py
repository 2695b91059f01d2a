"""The tests of the plugin, with nothing but the package, torch and composer3d's own kit."""

from __future__ import annotations

import pytest
import torch
from composer3d_nvtx import Nvtx
from pydantic import ValidationError
from torch import nn

import composer3d
from composer3d.testing import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def forward(self, x):
        return self.layers(x)


def loss_fn(output, target):
    return (output - target).square().sum(), target.numel()


def shown(manifest, steps):
    """Train under torch's profiler; return how often each of the plugin's ranges was seen, and the last loss."""
    run = composer3d.compose(Net, manifest, loss_fn=loss_fn)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    with torch.profiler.profile(acc_events=True) as profiler:
        for number in range(steps):
            with run.step(number):
                loss = run.forward_backward(torch.ones(2, 4), target=torch.zeros(2, 2))
                optimizer.step()
                optimizer.zero_grad()
        run.evaluate(torch.ones(2, 4), target=torch.zeros(2, 2))
    run.close()
    names = [event.name.removeprefix("composer3d.") for event in profiler.events() if "composer3d." in event.name]
    return {name: names.count(name) for name in sorted(set(names))}, float(loss)


def manifest(folder, options=""):
    path = folder / "run.toml"
    path.write_text(f"composer3d = 1\n[sharding.fsdp2]\n{options}")
    return path


def test_spans_are_ranges_on_every_rank(tmp_path):
    expected = {"backward": 4, "evaluate": 1, "forward": 4, "forward_backward": 4, "optimizer": 4, "step": 4}
    # The model is one unit, which stays gathered from its forward to its backward.
    expected |= {"all_gather": 5, "all_reduce": 8, "reduce_scatter": 4}
    for counts, _ in run_ranks(shown, 2, manifest(tmp_path, "[profiling.nvtx]\n"), 4):
        assert counts == expected


def test_only_every_third_step_is_shown(tmp_path):
    expected = {"backward": 2, "evaluate": 1, "forward": 2, "forward_backward": 2, "optimizer": 2, "step": 2}
    expected |= {"all_gather": 3, "all_reduce": 4, "reduce_scatter": 2}
    for counts, _ in run_ranks(shown, 2, manifest(tmp_path, "[profiling.nvtx]\nevery = 3\n"), 5):
        assert counts == expected


def test_watching_changes_nothing(tmp_path):
    _, watched = run_ranks(shown, 2, manifest(tmp_path, "[profiling.nvtx]\n"), 3)[0]
    counts, plain = run_ranks(shown, 2, manifest(tmp_path), 3)[0]
    assert (counts, plain) == ({}, watched)


def test_options():
    assert Nvtx().every == 1
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Nvtx(every=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranges_on_cuda():
    from composer3d_nvtx import _Ranges

    ranges = _Ranges(1, cuda=True)
    _, handle = token = ranges.begin("step", {"step": 0})
    assert isinstance(handle, int)
    ranges.end(token)
