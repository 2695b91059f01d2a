"""Time of offloading in plans: bytes over the link, of the host's memory and of a drive, and what hides them."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.nvme_offload.disk import BLOCK, StateFile
from composer3d_plugins.sharding.nvme_offload.disk_buffers import Copies
from composer3d_plugins.sharding.nvme_offload.disk_optimizer import on_disk

import composer3d
from composer3d import HostMemory
from composer3d.models import llama
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.reports.plan_difference import moved_terms

ARGS = {"dim": 256, "num_layers": 6, "num_heads": 4, "vocab_size": 1024}
RUN = """composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 256, num_layers = 6, num_heads = 4, vocab_size = 1024 }
[data]
use = "synthetic"
seq_len = 64
[train]
steps = 1
global_batch = 8
microbatch = 2
[mesh]
dp_shard = 2
[sharding.fsdp2]
"""
DISK = 'sharding.nvme_offload={folder="disk",chunk_mib=0.25,depth=2}'
OFFLOAD = "sharding.cpu_offload.mode"
H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return a function that plans with overrides; a trace is made once for all tests."""
    folder = tmp_path_factory.mktemp("plans")
    path = folder / "run.toml"
    path.write_text(RUN)

    def planned(*overrides, hardware="h100", **options):
        return composer3d.plan(path, hardware=hardware, overrides=overrides, **options).to_json()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSER3D_TRACES", str(folder / "traces"))
        yield planned


@pytest.fixture(scope="module")
def shards():
    """Return the bytes of a rank's shards by FQN: every dim is even, so that both ranks have half."""
    return {name: 2 * parameter.numel() for name, parameter in llama(**ARGS).named_parameters()}


def terms(planned):
    return {row["what"]: (row["bytes"], row["seconds"]) for row in planned["time"]["offloading"]}


def times(planned, *names):
    return [planned["time"][f"{name}_s"]["value"] for name in names]


def hardware_text(table):
    """Return the text of a hardware file with one more table."""
    with open(composer3d.planning.hardware.__path__[0] + "/h100.toml") as file:
        return f"{file.read()}\n{table}"


def slow_drive(folder, *, per="node"):
    """Return a hardware file of a drive so slow that it decides a step's time."""
    path = folder / "slow.toml"
    drive = f'[drive]\nname = "a disk"\nread = "200 MB/s"\nwrite = "100 MB/s"\nper = "{per}"\nsource = "a test"\n'
    path.write_text(hardware_text(drive))
    return str(path)


# ---- a drive ---------------------------------------------------------------------------------------------------------


def test_moments_are_read_and_written_once_a_step_and_the_drive_decides_its_time(plan, shards):
    moments = sum(2 * -(-size // BLOCK) * BLOCK for size in shards.values())
    plain, found = plan(), plan(DISK)
    # One drive for the two ranks that are on a node.
    read_s, write_s = moments / (6.5e9 / 2), moments / (4e9 / 2)
    assert terms(found)["reads"] == (moments, pytest.approx(read_s))
    assert terms(found)["writes"] == (moments, pytest.approx(write_s))
    step, optimizer = times(plain, "step", "optimizer")
    assert times(found, "step", "optimizer") == pytest.approx([step - optimizer + read_s + write_s, read_s + write_s])
    # Moments come to the device and go back on its own stream: padding is not copied.
    assert terms(found)["copies waited for"][0] == 4 * sum(shards.values())


def test_steps_hide_a_drive_that_is_fast_enough_but_not_the_copies_to_the_device(plan, shards):
    found = plan(DISK, what_if={"drive": 100})
    copies = 4 * sum(shards.values()) / H100.host.reached
    assert copies > sum(terms(found)[name][1] for name in ("reads", "writes"))
    assert times(found, "optimizer")[0] > copies
    twice = plan(DISK, what_if={"drive": 50})
    assert times(twice, "step") == times(found, "step")


def test_a_drive_of_a_hardware_file_is_taken_and_none_is_assumed(plan, shards, tmp_path):
    moments = sum(2 * -(-size // BLOCK) * BLOCK for size in shards.values())
    assumed = plan(DISK)
    assert sum("[drive] in a hardware file states another" in note for note in assumed["time"]["notes"]) == 1
    for per, parts in (("node", 2), ("device", 1)):
        found = plan(DISK, hardware=slow_drive(tmp_path, per=per))
        assert terms(found)["writes"] == (moments, pytest.approx(moments / (100e6 / parts)))
        assert not any("[drive]" in note for note in found["time"]["notes"])


def test_a_slower_drive_is_asked_for_and_is_in_the_sensitivity(plan):
    plain, half = plan(DISK), plan(DISK, what_if={"drive": 0.5})
    parts = {row["part"]: row["times"] for row in plain["time"]["sensitivity"]}
    assert parts["drive"] == pytest.approx(half["time"]["what_if"]["times"])
    assert parts["drive"] > 1.5
    assert parts.keys() - {row["part"] for row in plan()["time"]["sensitivity"]} == {"host", "drive"}


def test_two_depths_are_the_whole_model(plan):
    for overrides in ((DISK,), (f'{OFFLOAD}="all"',)):
        short, whole = plan(*overrides), plan(*overrides, full=True)
        assert short["ranks"][0]["is_extrapolated"] and not whole["ranks"][0]["is_extrapolated"]
        assert short["ranks"][0]["memory"] == whole["ranks"][0]["memory"]
        assert terms(short) == terms(whole)


def test_buffers_of_pieces_are_in_host_memory_as_a_real_optimizer_has_them(plan, tmp_path):
    # Of 0.25 MiB of parameters at once, with two moments each: 2 * depth + 1 of them.
    assert plan(DISK)["ranks"][0]["memory"]["host"] == 5 * 2 * 2**18
    host, device = HostMemory(), torch.device("cpu")
    parameters = [torch.nn.Parameter(torch.zeros(2**16)) for _ in range(12)]  # a piece each
    file = StateFile(tmp_path, chunk_bytes=2**18, num_threads=2)
    make = on_disk(
        torch.optim.AdamW, file=file, piece_bytes=2**18, depth=2, device=Copies(device, host, is_planned=False)
    )
    optimizer = make(parameters, lr=1e-3)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    file.close()
    assert host.pooled == 5 * 2 * 2**18
    assert (file.read_bytes, file.written_bytes) == (2 * 12 * 2**19, 3 * 12 * 2**19)


# ---- the host --------------------------------------------------------------------------------------------------------


def gathered(shards, num_microbatches=2):
    """Return the bytes of shards that come to the device: blocks for forward and backward, the rest once."""
    return num_microbatches * sum(size * (2 if name.startswith("layers.") else 1) for name, size in shards.items())


def test_shards_come_to_the_device_and_gradients_leave_it(plan, shards):
    whole, found = sum(shards.values()), plan(f'{OFFLOAD}="all"')
    # The first micro-batch's gradients leave beside the backward; a second one's are waited for, and added by the host.
    assert terms(found)["copies beside compute"][0] == gathered(shards) + whole
    assert terms(found)["copies waited for"][0] == whole
    added = 3 * whole
    clipped = 3 * whole  # a norm reads gradients, the scaling reads and writes them
    stepped = 7 * whole  # reads of weight, gradient and two moments, writes of all but the gradient
    moved, seconds = terms(found)["steps of the host"]
    assert moved == pytest.approx(added + clipped + stepped, rel=1e-3)
    assert seconds == pytest.approx(moved / (614.4e9 * 0.8 / 2))


def test_the_host_steps_for_as_long_as_its_memory_takes_and_nothing_hides_it(plan, shards):
    plain, found, half = plan(), plan(f'{OFFLOAD}="all"'), plan(f'{OFFLOAD}="all"', what_if={"host_memory": 0.5})
    _, seconds = terms(found)["steps of the host"]
    assert times(half, "step")[0] - times(found, "step")[0] == pytest.approx(seconds)
    assert times(found, "step")[0] > times(plain, "step")[0] + 0.5 * seconds
    stepped = 7 * sum(shards.values()) / (614.4e9 * 0.8 / 2)
    launches = 2 * H100.device.launch_s  # of the numbers of steps, which lie on the device
    assert times(found, "optimizer") == [pytest.approx(stepped + launches, rel=0.01)]
    assert sum("[host_memory] in a hardware file states another" in note for note in found["time"]["notes"]) == 1


def test_copies_that_compute_cannot_hide_take_the_time_of_the_link_in_the_fuller_direction(plan, shards):
    slow = {"host": 0.01}
    link = 0.01 * H100.host.reached
    plain, found = plan(what_if=slow), plan(f'{OFFLOAD}="all"', what_if=slow)
    whole = sum(shards.values())
    blocks = sum(size for name, size in shards.items() if name.startswith("layers."))
    # Forwards gather everything; in the first backward blocks come while gradients go, of which there are more.
    copies = (2 * whole + max(blocks, whole) + max(blocks, whole)) / link
    host = terms(found)["steps of the host"][1]
    assert copies + host < times(found, "step")[0] < copies + host + times(plain, "step")[0]


def test_a_step_on_the_device_fetches_weights_and_gradients_of_host_memory(plan, shards):
    found = plan(f'{OFFLOAD}="parameters"')
    whole = sum(shards.values())
    # Weights go back beside the fetches of the next piece.
    assert terms(found)["copies beside compute"][0] == gathered(shards) + whole + 2 * whole
    assert terms(found)["steps of the host"][0] == pytest.approx(6 * whole, rel=1e-3)


def test_averages_of_weights_in_host_memory_lie_there_and_are_updated_by_the_host(plan, shards):
    whole, offloaded = sum(shards.values()), f'{OFFLOAD}="all"'
    plain, found = plan(offloaded), plan(offloaded, "ema.decay=0.9")
    memories = [each["ranks"][0]["memory"] for each in (plain, found)]
    assert memories[1]["host"] - memories[0]["host"] == whole
    assert memories[1]["peak"] == memories[0]["peak"] and "averages" not in memories[1]
    assert terms(found)["steps of the host"][0] - terms(plain)["steps of the host"][0] == 3 * whole


def test_products_of_the_host_are_noted(plan):
    told = "matrix products that the host computes are timed by the bytes"
    for optimizer, number in (("muon", 1), ("adamw", 0)):
        notes = plan(f'{OFFLOAD}="all"', f'optimizer.use="{optimizer}"')["time"]["notes"]
        assert sum(note.startswith(told) for note in notes) == number


def test_plans_without_offloading_have_none_of_it(plan):
    assert "offloading" not in plan()["time"]


def test_two_plans_are_compared_by_what_offloading_takes(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    one, other = (composer3d.plan(path, hardware="h100", overrides=more).plan for more in ((), (DISK,)))
    moved = {term.name: term.after for term in moved_terms(one, other) if term.group == "time"}
    (writes,) = (row["seconds"] for row in other.time["offloading"] if row["what"] == "writes")
    assert moved["offloading: writes"] == writes
    assert "offloading: writes" not in {term.name for term in moved_terms(one, one)}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            '[drive]\nread = "6 GB/s"\nwrite = "4 GB/s"\nname = "x"\nsource = "y"\n',
            "drive.read has no per: 6 GB/s may be",
        ),
        ('[drive]\nname = "x"\nper = "node"\nsource = "y"\n', "drive.write is missing"),
        ('[drive]\nname = "x"\nper = "node"\nsource = ""\n', "drive.source = ''; it is a text that is not empty"),
        ('[host_memory]\nname = "x"\nsource = "y"\n', 'host_memory.bandwidth has no per: write per = one of "device"'),
    ],
)
def test_tables_of_a_hardware_file_are_checked(table, told, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(hardware_text(table))
    with pytest.raises(composer3d.ComposerError) as caught:
        load_hardware(str(path))
    assert told in str(caught.value)
