"""Steps that cannot be taken, or take too long, in real runs, and what doctor says of each."""

from __future__ import annotations

import re

import pytest
from support.doctor_cases import in_child, lines, may_mount, mount, start, write

from composer3d.cli import main
from composer3d.diagnostics.doctor.memory_causes import told_request
from composer3d.processes.forking import limit_ranks

ZERO, ONE = r"rank 0 \(dp_shard 0\)", r"rank 1 \(dp_shard 1\)"
ANEW = "try: there is no complete checkpoint: the next run begins anew"


def matches(pattern, text):
    assert re.fullmatch(pattern, text), text


def test_a_rank_without_enough_memory(run):
    shown, found = run("memory", more="[profiling.memory_snapshot]\n")
    assert (found["kind"], found["rank"]) == ("out_of_memory", 1)
    matches(
        rf'{ONE} on \S+ ran out of memory in step 3, where it asked for 1.00 GiB more \(".*faulty_run.py", line \d+, '
        r"in needs_too_much\)",
        shown[0],
    )
    matches(r"  most resident memory that ranks held: rank \d [\d.]+ [GM]iB, rank \d [\d.]+ [GM]iB", shown[1])
    matches(
        r"  it held [\d.]+ KiB of .*[\d.]+ KiB of parameters.* \(memory/rank-1-step-3-out-of-memory.json\)",
        shown[2],
    )
    matches(r"  largest other tensors: \(.*", shown[3])
    assert any(ZERO.replace("\\", "") in line for line in shown[4:]) and "train.microbatch" in "".join(shown)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes.", "3.0 MiB"),
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.1 GiB", "20.00 GiB"),
    ],
)
def test_what_allocators_say_was_asked_for(message, told):
    assert told_request(message) == f", where it asked for {told} more"
    assert told_request("out of memory") == ""


def test_a_slow_rank(run):
    shown, found = run("slow", code=0, steps=20)
    assert (found["kind"], found["rank"]) == ("straggler", 1)
    match = re.fullmatch(
        rf"{ONE} is slow: forward takes it ([\d.]+) ms a step of its own, ([\d.]+) times the ([\d.]+) ms of the others",
        shown[0],
    )
    own, ratio, others = (float(number) for number in match.groups())
    # It is delayed by three times a whole step of both, however slow the machine is.
    assert own >= 60 and 1.5 < ratio and own > others
    matches(r"  the others wait [\d.]+ ms of every step for it \(median of \d+ steps\)", shown[1])


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a disk in a namespace of one's own")
def test_a_disk_that_is_full(folder, capfd):
    write(steps=3)
    disk = folder / "out" / "checkpoints"
    disk.mkdir(parents=True)
    with limit_ranks(2):
        assert in_child(lambda: mount(disk, "16k") or main(["run", "run.toml"])) == 3
    shown, found = lines(capfd)
    assert (found["kind"], found["rank"]) == ("disk_full", None), shown
    matches(
        r"the disk of out/checkpoints/step-3 is full: 0.0 of 0.0 MiB free now \(CheckpointError: "
        r"out/checkpoints/step-3: (?:rank \d: )?OSError: \[Errno 28\] No space left on device.*\) in step 2 while "
        "saving",
        shown[0],
    )
    assert shown[1:] == [
        "try: free space there, or set checkpoint.keep lower, or run.output to another disk; then run again",
        ANEW,
    ]


@pytest.mark.parametrize("has_finder", [True, False], ids=["anomaly", "replay"])
def test_a_loss_that_became_nan(run, capfd, has_finder):
    options = ['data.args.fault="poison"', "checkpoint.every=2"]
    shown, found = run("", *options, more="[profiling.anomaly]\n" if has_finder else "")
    assert (found["kind"], found["rank"]) == ("not_finite", None)
    matches(r"step \d+: the loss is not finite \(loss (nan|inf), gradient norm (nan|inf)\)", shown[0])
    if not has_finder:
        assert shown[1] == "try: composer3d doctor out --replay runs that step again, and finds the first module"
        shown, _ = lines(capfd, "--replay")
    matches(
        r"  the first that is not finite is the output of layers.1 \(Layer\), in that step, micro-batch 0, on "
        r"rank [01] \(dp_shard [01]\); its weights and what it was given are finite",
        shown[1],
    )
    assert shown[2].startswith("try: a lower optimizer.lr")


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_a_run_without_a_fault(run):
    """It has fewer steps than are compared: whether a machine that does other work delays a rank, no test knows."""
    shown, found = run("", code=0, steps=3)
    told = "2 ranks ended as they should; too few steps of all of them to tell whether one was slow"
    assert (shown, found["kind"]) == ([told], "ended")


def test_one_rank_alone(folder, capfd):
    write()
    assert main(start("mesh.dp_shard=1")) == 0
    shown, found = lines(capfd)
    assert (shown, found["kind"]) == (["1 rank ended as it should"], "ended")


def test_a_folder_of_something_else(tmp_path, capfd):
    assert main(["doctor", str(tmp_path)]) == 2
    told = f"{tmp_path}: is not the folder of a run, which has manifest.toml, or error.json\n"
    assert capfd.readouterr().err == told


def test_nothing_to_replay(run, capfd):
    run("", code=0)
    assert main(["doctor", "out", "--replay"]) == 2
    assert capfd.readouterr().err.endswith("did not end by a loss that is not finite; there is nothing to replay\n")
