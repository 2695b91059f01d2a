"""Ranks that die, hang or come apart in real runs, and what doctor says of each."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from pathlib import Path

from support.doctor_cases import lines, start, write

from composer3d.cli import main
from composer3d.diagnostics.doctor import examine, read_evidence
from composer3d.runner.launching.lock import attempts_of

ZERO, ONE = r"rank 0 \(dp_shard 0\)", r"rank 1 \(dp_shard 1\)"
PLUGIN = r"\((fsdp2|composer3d)\)"
GROUP = r"collective \d+ over dp_shard \(ranks 0 and 1; [^)]*\): "
FORWARD = r"in step 3, in forward \(microbatch 0\) in forward_backward, at faulty_run.py:\d+ in "
# Rank 0 waits in the all-gather of the first layer: halves of 8 x 8 weights and 8 biases.
WAITS = rf"{ZERO}: {FORWARD}forward, last collective all_gather of \[36\] over dp_shard {PLUGIN}"
ANEW = "try: there is no complete checkpoint: the next run begins anew"


def matches(pattern, text):
    assert re.fullmatch(pattern, text), text


def test_a_rank_that_was_killed(run):
    shown, found = run("killed")
    assert (found["kind"], found["rank"]) == ("killed", 1)
    matches(rf"{ONE} on \S+ was killed by SIGKILL in step 3", shown[0])
    matches(rf"  {GROUP}{ONE} did not come through all_gather of \[36\], in which rank 0 waited", shown[1])
    matches(rf"  {WAITS}", shown[2])
    assert "dmesg" in shown[3] and shown[4:] == [ANEW]


def test_a_rank_that_hangs_in_data_loading_while_it_hangs(folder, capfd):
    """Nothing has timed out yet: the ranks are asked."""
    write()
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # as composer3d's own forks do: see `composer3d.processes.forking.fork`
        os._exit(main(start('data.args.fault="hangs"', "run.grace_s=0.1")))
    try:
        deadline = time.monotonic() + 250
        while (found := diagnosed()) is None or found.kind != "data":
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        shown, found = lines(capfd)
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    assert found["rank"] == 1
    matches(
        rf"{ONE} waits for data, for \d+ s when it was asked: in step 3, in data_wait, at faulty_run.py:\d+ in "
        rf"wait_for_a_lock, last collective all_reduce of \[3\] over dp_shard {PLUGIN}",
        shown[0],
    )
    matches(rf"  {GROUP}{ONE} did not run all_reduce of \[13\], in which rank 0 waited", shown[1])
    matches(rf"  {ZERO}: in step 3, in all_reduce, at \S+ in \S+, last collective all_reduce of \[13\] .*", shown[2])
    assert "data source" in shown[3]


def diagnosed():
    if not list(attempts_of(Path("out")).glob("*/rank-1.progress")):
        return None
    return examine(read_evidence(Path("out")))


def test_a_collective_that_only_some_ranks_call(run):
    shown, found = run("extra", "run.timeout_s=5")
    assert found["kind"] == "other_collective"
    matches(
        rf"ranks ran different collectives: {GROUP}{ONE} ran all_reduce of \[3\] \(faulty_run.py:\d+ in "
        r"calls_another_collective\), while rank 0 ran all_gather of \[36\] \(fsdp2\)",
        shown[0],
    )
    matches(rf"  {WAITS}", shown[1])
    matches(rf"  {ONE}: {FORWARD}calls_another_collective, last collective all_reduce of \[3\] .*", shown[2])
    assert "same collectives in the same order" in shown[3]


def test_a_rank_that_waits_for_something_else(run):
    shown, found = run("stuck", "run.timeout_s=5")
    assert (found["kind"], found["rank"]) == ("missing", 1)
    matches(rf"{ONE} keeps the others waiting, for \d+ s when it was asked: {FORWARD}wait_for_a_lock, .*", shown[0])
    matches(rf"  {GROUP}{ONE} did not run all_gather of \[36\], in which rank 0 waited", shown[1])
    matches(rf"  {WAITS}", shown[2])


def test_shapes_that_do_not_fit(run):
    shown, found = run("shapes")
    assert (found["kind"], found["rank"]) == ("shapes", 0)
    matches(
        rf"{ZERO} on \S+ was aborted in sends_another_shape \(faulty_run.py:\d+\) in step 3: it was sent more than it "
        rf"expected, so its tensor is smaller than that of {ONE}, all_reduce of \[5000\] over dp_shard",
        shown[0],
    )
    matches(rf"  {ONE}: {FORWARD}sends_another_shape, last collective all_reduce of \[5000\] .*", shown[2])
    assert "equal shapes" in shown[3] and "run.debug=true" in shown[4]
