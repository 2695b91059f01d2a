from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine, padded, unpadded

from composer3d import StepError, guard
from composer3d.guard import Guard, Totals
from composer3d.mesh import AXES, resolve
from composer3d.testing import run_ranks

LOCKSTEP = '[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'
BROKEN = "; a rank skipped or repeated a batch"


def guard_of(**degrees):
    layout = resolve(degrees, axes=AXES, world_size=dist.get_world_size(), default="dp_shard")
    return Guard(layout=layout, rank=dist.get_rank(), group=None, device=torch.device("cpu"))


def totals(degrees, counts):
    return guard_of(**degrees).agree(step=3, call=0, counts=counts[dist.get_rank()], digest=0)


@pytest.mark.parametrize(
    ("degrees", "counts", "expected"),
    [
        pytest.param({}, [[3], [4]], Totals(count=7, num_microbatches=2, equal=False), id="dp"),
        pytest.param({}, [[4, 4], [4, 4]], Totals(count=16, num_microbatches=4, equal=True), id="equal"),
        pytest.param({}, [[4, 4], [3, 5]], Totals(count=16, num_microbatches=4, equal=False), id="same sums"),
        pytest.param({}, [[4, 4], [4]], Totals(count=12, num_microbatches=3, equal=True), id="fewer"),
        pytest.param({}, [[0], [0]], Totals(count=0, num_microbatches=2, equal=True), id="empty"),
        # Ranks along tp and pp hold the same samples, which count once.
        pytest.param({"tp": 2}, [[5, 3], [5, 3]], Totals(count=8, num_microbatches=2, equal=False), id="tp"),
        pytest.param({"pp": 2}, [[5, 5], [5, 5]], Totals(count=10, num_microbatches=2, equal=True), id="pp"),
        pytest.param({"cp": 2}, [[5], [3]], Totals(count=8, num_microbatches=2, equal=False), id="cp"),
        pytest.param({"tp": 2}, [[3], [3], [4], [4]], Totals(count=7, num_microbatches=2, equal=False), id="dp-tp"),
    ],
)
def test_counts_are_added_up_over_ranks_that_hold_other_tokens(degrees, counts, expected):
    assert run_ranks(totals, len(counts), degrees, counts) == [expected] * len(counts)


def refused(places, degrees=None, digests=None):
    """Return what each rank is told, being at its (step, batch), with its digest."""
    rank = dist.get_rank()
    step, call = places[rank]
    with pytest.raises(StepError) as caught:
        guard_of(**(degrees or {})).agree(step=step, call=call, counts=[1], digest=digests[rank] if digests else 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        pytest.param(
            [(2, 0), (3, 0), (2, 0)], "rank 1 is at step 3, while 2 of 3 ranks are at step 2", id="skips a step"
        ),
        pytest.param(
            [(2, 0), (2, 0), (1, 0)], "rank 2 is at step 1, while 2 of 3 ranks are at step 2", id="repeats a step"
        ),
        pytest.param(
            [(2, 1), (2, 0), (2, 1)],
            "rank 1 is at step 2, while 2 of 3 ranks are at step 2, batch 2",
            id="fewer batches",
        ),
        pytest.param(
            [(2, 0), (5, 0), (7, 2)],
            "rank 1 is at step 5, rank 2 is at step 7, batch 3, while 1 of 3 ranks are at step 2",
            id="all elsewhere",
        ),
        pytest.param(
            [(2, 0), (2, None), (2, 0)], "rank 1 is at evaluation 2, while 2 of 3 ranks are at step 2", id="evaluates"
        ),
    ],
)
def test_ranks_elsewhere_are_named_on_all_ranks(places, message):
    assert run_ranks(refused, 3, places) == [f"ranks do not run the same step: {message}{BROKEN}"] * 3


def test_ranks_along_tp_must_read_the_same_batch():
    places, degrees = [(2, 0)] * 4, {"dp_shard": 2, "tp": 2}
    message = (
        "ranks 2 and 3 were given different batches at step 2; ranks that differ only in tp or pp must read the same "
        "samples"
    )
    assert run_ranks(refused, 4, places, degrees, [7, 7, 5, 6]) == [message] * 4


def votes(table):
    return guard_of().any(table[dist.get_rank()])


def test_one_vote_counts_for_all():
    assert run_ranks(votes, 2, [[False, True, False], [False, False, True]]) == [[False, True, True]] * 2


def without_one(path, leaves):
    """Let the last rank stall, or leave the group; return what the others are told, and when."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    guard._MISSING_WAIT_S = 0.5
    store = dist.FileStore(str(path), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=2))
    own = guard_of()
    own.agree(step=0, call=0, counts=[1], digest=0)
    if rank == world_size - 1:
        if leaves:
            dist.destroy_process_group()
        store.wait([f"told/{other}" for other in range(world_size - 1)], timedelta(seconds=20))
        return None
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        own.agree(step=1, call=0, counts=[1], digest=0)
    took_s = time.monotonic() - start
    store.set(f"told/{rank}", "")
    store.wait([f"told/{other}" for other in range(world_size - 1)], timedelta(seconds=20))
    return str(caught.value), took_s


@pytest.mark.parametrize("leaves", [False, True], ids=["stalled", "gone"])
def test_a_rank_that_does_not_come_is_named(tmp_path, leaves):
    *others, _ = run_ranks(without_one, 3, tmp_path / "store", leaves)
    for rank, (message, took_s) in enumerate(others):
        assert message == (f"rank 2 did not reach step 1, which rank {rank} waited for: stalled, ended, or elsewhere")
        assert took_s < 6


def loop(text, odd_steps):
    """Run a loop whose rank 1 runs other steps than rank 0; return each rank's error."""
    run = composed(text)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with pytest.raises(StepError) as caught:
        for number in odd_steps if dist.get_rank() == 1 else (0, 1, 2):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((0, 2), "rank 1 is at step 2, while 1 of 2 ranks are at step 1"),
        ((0, 0, 1), "rank 1 is at step 0, while 1 of 2 ranks are at step 1"),
    ],
    ids=["skips", "repeats"],
)
def test_a_loop_that_loses_step_ends_on_all_ranks(steps, message):
    whole = f"ranks do not run the same step: {message}{BROKEN}"
    assert run_ranks(loop, 2, "[sharding.fsdp2]", steps) == [whole] * 2


def evaluates_instead():
    run = composed("[sharding.fsdp2]")
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with pytest.raises(StepError) as caught, run.step(1):
        (run.forward_backward if dist.get_rank() == 0 else run.evaluate)(tokens, target=targets)
    return str(caught.value)


def test_an_evaluation_is_not_taken_for_the_step_of_its_number():
    message = "ranks do not run the same step: rank 1 is at evaluation 1, while 1 of 2 ranks are at step 1" + BROKEN
    assert run_ranks(evaluates_instead, 2) == [message] * 2


def lockstep(shift):
    """Run two ranks along tp, the second on a batch shifted by some tokens."""
    run = composed("[mesh]\ntp = 2\n" + LOCKSTEP)
    tokens, targets = unpadded()
    tokens = (tokens + shift * run.coordinates["tp"]) % 11
    try:
        with run.step(0):
            return float(run.forward_backward(tokens, target=targets))
    except StepError as error:
        return str(error)


def test_composed_ranks_along_tp():
    assert len(set(run_ranks(lockstep, 2, 0))) == 1
    message = (
        "ranks 0 and 1 were given different batches at step 0; ranks that differ only in tp or pp must read the same "
        "samples"
    )
    assert run_ranks(lockstep, 2, 1) == [message] * 2
