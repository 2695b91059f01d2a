"""A rank that is late or lost in a step that opened itself is explained as in one that the loop opened."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import composed, mean_loss, mine, unpadded

from composer3d import RankError, StepError, torch_compat
from composer3d.testing import run_ranks

TIMEOUT_S = 2.0
CALLS = ("forward", "backward", "clip", "step", "evaluation")


class Voting(torch.optim.SGD):
    """An optimizer with a collective of its own."""

    def step(self, closure=None):
        dist.all_reduce(torch.ones(3))
        return super().step(closure)


def loop(run, optimizer, tokens, targets, before):
    """Train one step, and look at a batch; `before` is called before everything that has collectives."""
    before("forward")
    output = run.model(tokens)
    loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
    before("backward")
    run.backward(loss)
    before("clip")
    run.clip_grad_norm_(1.0)
    before("step")
    optimizer.step()
    optimizer.zero_grad()
    before("evaluation")
    with torch.no_grad():
        run.model(tokens)


def losing(call, end, path):
    """Hang or end rank 1 before a call of the second step; write what rank 0 is told."""
    run = composed("[sharding.fsdp2]")
    optimizer = run.optimizer(Voting, lr=0.1)
    batch = [mine(run, tensor) for tensor in unpadded()]
    loop(run, optimizer, *batch, before=lambda _: None)
    for group in (None, run.mesh.get_group("dp_shard")):
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))

    def before(name):
        if name == call and dist.get_rank() == 1:
            if end:
                os._exit(3)
            torch_compat.default_store().wait(["composer3d/flight/1/message"], timedelta(seconds=80))
            raise RuntimeError("Timed out waiting for nothing")

    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            loop(run, optimizer, *batch, before=before)
        return
    with pytest.raises(StepError) as caught:
        loop(run, optimizer, *batch, before=before)
    path.write_text(str(caught.value))


OPS = {
    "forward": r"all_?gather\w* of \[\d+\]",
    "backward": r"all_reduce of \[\d+\]",
    "clip": r"all_reduce of \[\d*\]",
    "step": r"all_reduce of \[3\]",
    "evaluation": r"all_?gather\w* of \[\d+\]",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_late_rank_is_named(call, tmp_path):
    run_ranks(losing, 2, call, False, tmp_path / "told")
    text = (tmp_path / "told").read_text()
    # The first unit gathers its parameters before the step opens.
    when = {"forward": "after step 0", "evaluation": "after step 1"}.get(call, "in step 1")
    assert re.match(rf"a collective failed {when}: \[[^\n]*\] Timed out waiting 2000ms", text), text
    missed = rf": rank 1 \(dp_shard 1\) did not run {OPS[call]}, in which rank 0 waited\n"
    assert re.search(missed, text), text
    assert re.search(r"\nrank 1 \(dp_shard 1\): [^\n]* at test_hangs\w*.py:\d+ in before, last collective", text), text
    assert re.search(r"\nrank 0 \(dp_shard 0\): [^\n]* at test_hangs\w*.py:\d+ in (loop|step), last", text), text


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_rank_that_ended_is_named(call, tmp_path):
    with pytest.raises(RankError):
        run_ranks(losing, 2, call, True, tmp_path / "told")
    text = (tmp_path / "told").read_text()
    assert re.match(rf"a collective failed {'in step 1' if call == 'backward' else 'after step 0'}: \[", text), text
    missed = rf": rank 1 \(dp_shard 1\) did not come through {OPS[call]}, in which rank 0 waited\n"
    assert re.search(missed, text), text
    assert "\nrank 1 (dp_shard 1): gave no answer: it ended, or hangs\n" in text


def stray(fault):
    """Run steps of which one rank takes one less, or clips by itself; return what it and the others are told."""
    run = composed("[sharding.fsdp2]\n", timeout_s=30 if fault == "skips" else 3 * TIMEOUT_S)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(8))
    told = ""
    try:
        for number in range(4):
            if fault == "skips" and number == 2 and run.context.rank == 1:
                continue
            run.backward(mean_loss(run.model(tokens), targets))
            if fault == "clips" and number == 1 and run.context.rank == 1:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except StepError as error:
        told = str(error)
    run.close()
    return told


def test_a_rank_that_skipped_a_step_is_named_by_its_end():
    waiting, skipping = run_ranks(stray, 2, "skips")
    assert "rank 1 (dp_shard 1) did not run all_gather of" in waiting and skipping == ""
    assert "and closed its run: its loop had fewer steps than others, or skipped one" in waiting


@pytest.mark.slow
def test_a_rank_that_clips_by_itself_is_named_with_its_line():
    for message in run_ranks(stray, 2, "clips"):
        assert "rank 1 (dp_shard 1) ran all_reduce of" in message and "while rank 0 ran all_gather of" in message
        assert "in test_hangs_in_own_steps.py:" in message and "linalg_vector_norm of a sharded tensor" in message
