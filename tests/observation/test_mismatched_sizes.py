"""Ranks whose collectives do not fit, in a loop of one's own: gloo would end one of them without a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import Even, composed, mean_loss, mine, seeded, unpadded

from composer3d import RankError, StepError
from composer3d.testing import run_ranks

TP = "[mesh]\ntp = 2\ndp_shard = 1\n[sharding.tensor_parallel]\n"


def loop(text, fault, folder):
    """Run three steps, in which the second rank does something alone; leave what the first one is told."""
    run = composed(text, seeded(Even))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    is_odd = dist.get_rank() == 1
    try:
        for _ in range(3):
            tokens, targets = (mine(run, tensor) for tensor in unpadded(8))
            if fault == "batch" and is_odd:
                tokens, targets = tokens[:6], targets[:6]
            if fault == "forward" and is_odd:
                with torch.no_grad():
                    run.model(tokens)
            run.backward(mean_loss(run.model(tokens), targets))
            if fault == "clip" and is_odd:
                run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if fault == "state" and is_odd:
                run.full_state_dict()
    except StepError as error:
        (Path(folder) / f"told-{dist.get_rank()}").write_text(str(error))


@pytest.mark.parametrize(
    ("text", "fault", "odd", "told"),
    [
        pytest.param(
            TP,
            "batch",
            1,
            r"rank 1 \(tp 1\) ran all_reduce of \[6, 5, 7\], while rank 0 ran all_reduce of \[8, 5, 7\]\n",
            id="another shape of the batch",
        ),
        pytest.param(
            "[sharding.ddp]\n",
            "clip",
            1,
            r"rank 1 \(dp_replicate 1\) ran all_reduce of \[\], while rank 0 ran all_reduce of \[13\]\n"
            r"rank 1 \(dp_replicate 1\): in step 0, in all_reduce, at test_mismatched_sizes.py:\d+ in loop, ",
            id="clipping",
        ),
        pytest.param(
            "[sharding.fsdp2]\n",
            "state",
            1,
            r"rank 1 \(dp_shard 1\) ran all_gather of \[1\] \(composer3d\), "
            r"while rank 0 ran all_gather of \[\d+\] \(fsdp2\)\n"
            r"rank 1 \(dp_shard 1\): after step 0, in full_state_dict, at test_mismatched_sizes.py:\d+ in loop, ",
            id="gathering a state",
        ),
        pytest.param(
            TP,
            "forward",
            0,
            r"rank 1 \(tp 1\) ran all_reduce of \[8, 5, 7\], while rank 0 ran all_reduce of \[13\]\n",
            id="a forward",
        ),
    ],
)
def test_what_one_rank_does_alone_is_told_on_all_ranks(text, fault, odd, told, tmp_path, capfd):
    """The rank that gloo would abort, which receives more than it expects, ends with the message of the others."""
    with pytest.raises(RankError, match=f"rank {odd} of 2 failed: left with exit code 1"):
        run_ranks(loop, 2, text, fault, str(tmp_path))
    message = (tmp_path / f"told-{1 - odd}").read_text()
    assert re.match(
        r"a collective failed [^\n]*: a rank was sent another number of bytes than its collective expects\n"
        rf"collective \d+ over \w+ \(ranks 0 and 1; [^)]*\): {told}",
        message,
    ), message
    shown = capfd.readouterr().err
    assert shown == f"composer3d.errors.StepError: {message}\n" and "terminate called" not in shown
