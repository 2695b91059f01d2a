"""Offloading in plans: what lies in host memory is no memory of an accelerator, and is all of a CPU's."""

from __future__ import annotations

import pytest

import composer3d
from composer3d.planning.hardware.hardware_file import load_hardware

RUN = """composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 256, num_layers = 4, num_heads = 4, vocab_size = 1024 }
[data]
use = "synthetic"
seq_len = 256
[train]
steps = 1
global_batch = 4
microbatch = 2
[mesh]
dp_shard = 2
[sharding.fsdp2]
"""
OFFLOAD = "sharding.cpu_offload"


def planned(folder, *overrides, hardware="h100", what_if=None):
    """Return the memory, the step time and the notes of the first rank's plan."""
    path = folder / "run.toml"
    path.write_text(RUN)
    made = composer3d.plan(path, hardware=hardware, overrides=overrides, what_if=what_if).to_json()
    return made["ranks"][0]["memory"], made["time"]["step_s"]["value"], made["notes"]


@pytest.fixture(autouse=True)
def untraced(monkeypatch):
    monkeypatch.setenv("COMPOSER3D_TRACES", "off")


@pytest.mark.parametrize(
    ("mode", "away"),
    [
        ("optimizer", ("optimizer",)),
        ("parameters", ("parameters", "gradients")),
        ("all", ("parameters", "gradients", "optimizer")),
    ],
)
def test_what_is_offloaded_is_in_host_memory(mode, away, tmp_path):
    plain, *_ = planned(tmp_path)
    pieces = () if mode == "all" else (f"{OFFLOAD}.piece_mib=0.5",)
    found, *_ = planned(tmp_path, f'{OFFLOAD}.mode="{mode}"', *pieces)
    # Numbers of steps stay on the device, and so does what is of no shape.
    assert all(found[name] <= plain[name] / 1000 for name in away)
    assert found["host"] == pytest.approx(sum(plain[name] for name in away), rel=1e-3)
    assert found["peak"] < plain["peak"] - 0.9 * sum(plain[name] for name in away if name != "gradients")
    assert plain["host"] == 0


def test_gradients_and_activations_are_in_host_memory_while_they_are_not_needed(tmp_path):
    plain, *_ = planned(tmp_path)
    gradients, *_ = planned(tmp_path, f'{OFFLOAD}.mode="gradients"')
    assert gradients["host"] == pytest.approx(plain["gradients"], rel=1e-3)
    activations, *_ = planned(tmp_path, "scheduling.activation_offload.min_mib=0")
    assert activations["activations"] < plain["activations"] / 2
    assert activations["host"] > plain["activations"] / 2
    assert activations["peak"] < plain["peak"]


def test_copies_of_activations_that_compute_cannot_hide_take_the_time_of_the_link(tmp_path):
    slow = {"host": 0.01}
    _, plain, _ = planned(tmp_path, what_if=slow)
    found, away, _ = planned(tmp_path, "scheduling.activation_offload.min_mib=0", what_if=slow)
    # One micro-batch a step: all that is in host memory went there, and comes back, each beside its part of the step.
    copies = 2 * found["host"] / (0.01 * load_hardware("h100").host.reached)
    assert copies > 5 * plain
    assert copies < away < copies + plain


def test_copies_take_the_time_of_the_link_to_the_host(tmp_path):
    _, plain, _ = planned(tmp_path)
    found, away, _ = planned(tmp_path, f"{OFFLOAD}={{}}")
    state = found["host"] / load_hardware("h100").host.reached
    # The step of what has come to the device runs beside the copies, which go both ways at once.
    assert 0.5 * state < away - plain < 1.5 * state


def test_on_a_cpu_host_and_device_are_one_memory(tmp_path):
    plain, *_ = planned(tmp_path, "run.device='cpu'")
    found, *_ = planned(tmp_path, "run.device='cpu'", f"{OFFLOAD}={{}}")
    assert found["optimizer"] == plain["optimizer"]
    assert found["host"] == 0
