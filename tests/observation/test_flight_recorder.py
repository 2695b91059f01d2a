from __future__ import annotations

import json
import logging
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine, padded

from composer3d import RankError, StepError, torch_compat
from composer3d.observation.flight_recorder import _late
from composer3d.observation.recorded_collectives import collectives
from composer3d.testing import run_ranks

TIMEOUT_S = 2.0


def failing(case):
    """Run steps of two ranks, with a fault in step 1; return what each is told, and how long that took."""
    from datetime import timedelta

    run = composed("[sharding.fsdp2]")
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    for group in (None, run.mesh.get_group("dp_shard")):
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        faulty_step(run, case, tokens, targets)
    return str(caught.value), time.monotonic() - start


def faulty_step(run, case, tokens, targets):
    with run.step(1):
        if case == "hangs" and dist.get_rank() == 1:
            linger()
        run.forward_backward(tokens, target=targets)
        if case in ("missing", "other") and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(5))
        if case == "other" and dist.get_rank() == 1:
            dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))
            linger()
        if case == "missing" and dist.get_rank() == 1:
            linger()


def linger():
    """Wait for what rank 0 will say, without a collective."""
    store, deadline = torch_compat.default_store(), time.monotonic() + 250
    while not store.check(["composer3d/flight/1/message"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    raise RuntimeError("Timed out waiting for nothing")


# gloo closes the connection of the rank whose time is up first, and the other one may see that before its own time is.
REASON = (
    r"a collective failed in step 1: \[[^\n]*\] (Timed out waiting 2000ms for (recv|send) operation to complete|"
    r"Connection closed by peer \[127\.0\.0\.1\]:\d+)\n"
)


@pytest.mark.parametrize(
    ("case", "missed", "first"),
    [
        pytest.param(
            "hangs",
            r"all_reduce of \[13\]",
            r"in step 1, in all_reduce, at test_flight\w*.py:\d+ in faulty_step, "
            r"last collective all_reduce of \[13\] over dp_shard \(composer3d\)",
            id="a rank that hangs",
        ),
        pytest.param(
            "missing",
            r"all_reduce of \[5\]",
            r"in step 1, at test_flight\w*.py:\d+ in faulty_step, "
            r"last collective all_reduce of \[5\] over dp_shard \(test_flight_recorder.py:\d+ in faulty_step\)",
            id="a collective that only one rank calls",
        ),
    ],
)
def test_a_missing_collective_names_everything(case, missed, first):
    (text, took_s), (other, _) = run_ranks(failing, 2, case)
    issuer = "composer3d" if case == "hangs" else r"test_flight_recorder.py:\d+ in faulty_step"
    assert re.fullmatch(
        REASON + rf"collective \d+ over dp_shard \(ranks 0 and 1; {issuer}\): "
        rf"rank 1 \(dp_shard 1\) did not run {missed}, in which rank 0 waited\n"
        r"rank 1 \(dp_shard 1\): in step 1, at test_flight\w*.py:\d+ in linger, last collective \w+ of \[[\d, ]*\] "
        r"over dp_shard \((fsdp2|composer3d)\)\n"
        rf"rank 0 \(dp_shard 0\): {first}",
        text,
    ), text
    assert other == text
    assert took_s < TIMEOUT_S + 60  # torch's own timeout is half an hour


def failing_forks():
    """Run collectives of a world of one, and then fork ranks whose groups have the same name and numbers."""
    for _ in range(64):
        dist.all_gather([torch.ones(4)], torch.ones(4))
    dist.destroy_process_group()
    return [text for text, _ in run_ranks(failing, 2, "hangs")]


def test_collectives_of_the_process_that_forked_the_ranks_are_not_taken_for_theirs():
    for text in run_ranks(failing_forks, 1)[0]:
        assert "rank 1 (dp_shard 1) did not run all_reduce of [13], in which rank 0 waited" in text


def test_another_collective_is_named():
    (text, took_s), (other, _) = run_ranks(failing, 2, "other")
    assert re.fullmatch(
        REASON + r"collective (\d+) over dp_shard \(ranks 0 and 1; test_flight_recorder.py:\d+ in faulty_step and "
        r"test_flight_recorder.py:\d+ in faulty_step\): "
        r"rank 1 \(dp_shard 1\) ran all_gather of \[5\] \(test_flight_recorder.py:\d+ in faulty_step\), "
        r"while rank 0 ran all_reduce of \[5\] \(test_flight_recorder.py:\d+ in faulty_step\)\n"
        r"rank 1 \(dp_shard 1\): in step 1, at test_flight\w*.py:\d+ in (linger|faulty_step), "
        r"last collective all_gather of \[5\] over dp_shard \(test_flight_recorder.py:\d+ in faulty_step\)\n"
        r"rank 0 \(dp_shard 0\): in step 1, at test_flight\w*.py:\d+ in faulty_step, "
        r"last collective all_reduce of \[5\] over dp_shard \(test_flight_recorder.py:\d+ in faulty_step\)",
        text,
    ), text
    assert other == text
    assert took_s < TIMEOUT_S + 60  # torch's own timeout is half an hour


NCCL = """
{"entries": [
 {"record_id": 7, "pg_id": 1, "process_group": ["1", "mesh_tp"], "collective_seq_id": 3, "p2p_seq_id": 0, "op_id": 3,
  "profiling_name": "nccl:_all_gather_base", "time_created_ns": 200, "input_sizes": [[2, 8]], "input_dtypes": ["Float"],
  "output_sizes": [[4, 8]], "output_dtypes": ["Float"], "state": "started", "retired": false, "timeout_ms": 600000,
  "is_p2p": false},
 {"record_id": 6, "pg_id": 1, "process_group": ["1", "mesh_tp"], "collective_seq_id": 2, "p2p_seq_id": 0, "op_id": 2,
  "profiling_name": "nccl:all_reduce", "time_created_ns": 100, "input_sizes": [[4]], "input_dtypes": ["Float"],
  "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "completed", "retired": true, "timeout_ms": 600000,
  "is_p2p": false},
 {"record_id": 8, "pg_id": 1, "process_group": ["1", "mesh_tp"], "collective_seq_id": 3, "p2p_seq_id": 1, "op_id": 4,
  "profiling_name": "nccl:send 0->1", "time_created_ns": 300, "input_sizes": [[4]], "input_dtypes": ["Float"],
  "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "started", "retired": false, "timeout_ms": 600000,
  "is_p2p": true}]}
"""


def test_records_of_nccl_are_read():
    rows = collectives(json.loads(NCCL)["entries"], {"1": ("tp", (0, 1))})
    assert [(row.number, str(row), row.axis, row.dtypes, row.backend, row.pending) for row in rows] == [
        (2, "all_reduce of [4]", "tp", ("Float",), "nccl", False),
        (3, "all_gather of [2, 8]", "tp", ("Float",), "nccl", True),
    ]


def test_what_nccl_has_not_answered_is_late_only_after_most_of_its_time():
    entries, minute = json.loads(NCCL)["entries"], 60_000_000_000  # the timeout is ten of them
    assert _late(entries, 200 + 7 * minute) is None
    assert _late(entries, 200 + 9 * minute) == 540


def late(recorded):
    """Wait for what the thread logs, where NCCL's recorder says that a collective waits; return it."""
    from torch._C import _distributed_c10d

    run = composed("[sharding.fsdp2]")
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    # As if these ranks had an NCCL beside their gloo: what it would have recorded stands in for it.
    group = torch_compat.group_name(run.mesh.get_group("dp_shard"))
    text = recorded[dist.get_rank()].replace('["1", "mesh_tp"]', f'["{group}", "mesh_dp_shard"]')
    waiting = json.loads(text)
    for number, entry in enumerate(waiting["entries"]):
        entry |= {"time_created_ns": time.time_ns() + number, "timeout_ms": 100}
    text = json.dumps(waiting)
    _distributed_c10d._dump_nccl_trace_json = lambda **options: text
    told, logger = [], logging.getLogger("composer3d.observation.flight_recorder")
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    logger.propagate = False
    store, deadline = torch_compat.default_store(), time.monotonic() + 250
    with run.step(1):
        while not told and not store.check(["done"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        store.set("done", "")
    return told


def test_what_nccl_waits_for_is_told_before_its_watchdog_ends_the_rank():
    first = json.loads(NCCL)
    second = {"entries": [entry for entry in first["entries"] if entry["record_id"] == 6]}
    (told, nothing) = run_ranks(late, 2, [json.dumps(first), json.dumps(second)])
    assert nothing == [] and len(told) == 1
    assert re.fullmatch(
        r"a collective failed in step 1: no answer for \d+ s\n"
        r"collective 3 over dp_shard \(ranks 0 and 1; fsdp2( or composer3d)?\): "
        r"rank 1 \(dp_shard 1\) did not run all_gather of \[2, 8\], in which rank 0 waited\n"
        r"rank 1 \(dp_shard 1\): in step 1, at test_flight\w*.py:\d+ in late, last collective [^\n]*\n"
        r"rank 0 \(dp_shard 0\): in step 1, at test_flight\w*.py:\d+ in late, last collective [^\n]*",
        told[0],
    ), told[0]


def own_groups():
    """Return how collectives of groups that the loop made stand in a rank's account."""
    run = composed(
        '[mesh]\ndp_shard = 2\ntp = 2\n[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n[sharding.fsdp2]\n'
    )
    diagonal, pair = dist.new_group([0, 3]), dist.new_group([1, 2])
    dist.all_reduce(torch.ones(4), group=diagonal if dist.get_rank() in (0, 3) else pair)
    found = run.context.flight._account([]).collectives
    run.close()
    return {(row.axis, row.ranks) for row in found if row.sizes == ((4,),)}


def test_groups_that_no_axis_owns_are_known_by_the_axes_they_span():
    outer, inner = ("dp_shard x tp", (0, 3)), ("dp_shard x tp", (1, 2))
    assert run_ranks(own_groups, 4) == [{outer}, {inner}, {inner}, {outer}]


def outside(activity):
    """Hang rank 1 where rank 0 saves, evaluates, or does something of the loop's own; return what each is told."""
    from datetime import timedelta

    run = composed("[sharding.fsdp2]")
    tokens, targets = (mine(run, tensor) for tensor in padded())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    for group in (None, run.mesh.get_group("dp_shard")):  # after a step, which may take as long on a busy machine
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))
    with pytest.raises(StepError) as caught:
        if dist.get_rank() == 1:
            with run.explaining("data"):
                linger()
        elif activity == "save":
            run.save("/nowhere/that/matters")
        elif activity == "evaluate":
            run.evaluate(tokens, target=targets)
        else:
            with run.explaining(activity):
                dist.all_reduce(torch.ones(7))
    return str(caught.value)


@pytest.mark.parametrize("activity", ["save", "evaluate", "my own vote"])
def test_a_hang_outside_of_steps_names_what_every_rank_does(activity):
    text, other = run_ranks(outside, 2, activity)
    assert text == other
    assert re.match(r"a collective failed after step 0: \[[^\n]*\] Timed out waiting 2000ms", text), text
    assert re.search(r": rank 1 \(dp_shard 1\) did not run \w+ of [^\n]*, in which rank 0 waited\n", text), text
    assert re.search(r"\nrank 1 \(dp_shard 1\): after step 0, in data, at test_flight\w*.py:\d+ in linger", text), text
    assert re.search(rf"\nrank 0 \(dp_shard 0\): after step 0, in {activity}, ", text), text


def inside_of_a_stage():
    """Hang a rank in the forward of a stage that its neighbour in another axis waits in."""
    from datetime import timedelta

    run = composed(
        '[mesh]\npp = 2\ndp_shard = 2\n[scheduling.pipeline]\nschedule = "GPipe"\n'
        "[sharding.fsdp2]\n[train]\nmicrobatch = 3\n"
    )
    for group in (None, run.mesh.get_group("pp"), run.mesh.get_group("dp_shard")):
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    group = run.mesh.get_group("dp_shard")

    def vote(module, args):
        if dist.get_rank() == 3:
            linger()
        dist.all_reduce(torch.ones(5), group=group)

    if dist.get_rank() > 1:
        run.parts[0].module.register_forward_pre_hook(vote)
    with pytest.raises(StepError) as caught, run.step(1):
        run.forward_backward(tokens, target=targets)
    return str(caught.value)


def test_a_collective_that_fails_inside_of_a_stage_is_explained():
    texts = run_ranks(inside_of_a_stage, 4)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    # Which of those that wait gives up first is a matter of milliseconds; whom they wait for in the end is not.
    told = next(number for number, line in enumerate(lines) if re.match(r"rank \d \(", line))
    assert re.search(
        r": rank 3 \(pp 1, dp_shard 1\) did not "
        r"(run all_reduce of \[5\], in which rank 2|come to it, and rank 1) waited$",
        lines[told - 1],
    ), texts[0]
    assert re.match(r"rank 3 \(pp 1, dp_shard 1\): in step 1, in [^\n]*at test_flight\w*.py:\d+ in linger", lines[told])


def stages():
    """Let the last stage of a pipeline end before its second forward."""
    run = composed('[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "GPipe"\n[train]\nmicrobatch = 6\n')
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    if dist.get_rank() == 1:
        run.parts[0].module.register_forward_pre_hook(lambda module, args: os._exit(7))
    with run.step(1):
        run.forward_backward(tokens, target=targets)


def test_a_stage_that_does_not_come_to_an_exchange_is_named():
    with pytest.raises(RankError) as caught:
        run_ranks(stages, 2)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed: left with exit code 7")
    assert re.search(r"\nrank 0 failed after it: composer3d.errors.StepError: a collective failed in step 1: ", text), (
        text
    )
    assert (
        "\na send or receive between stages along pp (rank 0 and rank 1; pipeline): "
        "rank 1 (pp 1) did not come to it, and rank 0 waited\n"
        "rank 1 (pp 1): gave no answer: it ended, or hangs\n"
        "rank 0 (pp 0): in step 1, in "
    ) in text


def hanging_stage(step):
    """Hang the last stage of a pipeline before its forward in a step; return what each rank is told, and how late."""
    from datetime import timedelta

    run = composed('[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "GPipe"\n[train]\nmicrobatch = 6\n')
    for group in (None, run.mesh.get_group("pp")):
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for number in range(step):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
    if dist.get_rank() == 1:
        run.parts[0].module.register_forward_pre_hook(lambda module, args: linger())
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        with run.step(step):
            run.forward_backward(tokens, target=targets)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("step", [0, 1])
def test_a_stage_that_hangs_is_named_within_the_timeout(step):
    (text, took_s), (other, _) = run_ranks(hanging_stage, 2, step)
    assert text == other
    assert text.startswith(f"a collective failed in step {step}: "), text
    assert re.search(
        r"\na send or receive between stages along pp \(rank 0 and rank 1; pipeline\): "
        r"rank 1 \(pp 1\) did not come to it, and rank 0 waited\n"
        rf"rank 1 \(pp 1\): in step {step}, in [^\n]*at test_flight\w*.py:\d+ in linger",
        text,
    ), text
    assert took_s < TIMEOUT_S + 60  # torch's own timeout is half an hour
