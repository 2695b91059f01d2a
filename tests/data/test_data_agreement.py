from __future__ import annotations

import pytest
import torch.distributed as dist
from support.models import composed
from support.training import start, write

from composer3d import RankError, StepError
from composer3d.runner.data.data_agreement import agree_on_data
from composer3d.testing import run_ranks

TEXT = {"kind": "text", "use": "/a/corpus", "sha256": "ab", "num_samples": 7}


def agreeing(records):
    run = composed("[sharding.fsdp2]")
    agree_on_data(run.context, records[dist.get_rank()])
    return True


def refused(records):
    with pytest.raises(StepError) as caught:
        agreeing(records)
    return str(caught.value)


def test_the_same_files_may_lie_elsewhere():
    assert run_ranks(agreeing, 2, [TEXT, TEXT | {"use": "/b/corpus"}]) == [True, True]


@pytest.mark.parametrize(
    ("records", "difference"),
    [
        ([TEXT, TEXT | {"sha256": "cd"}], 'data.sha256 is "cd" on rank 1 and "ab" on rank 0'),
        (
            [TEXT | {"kind": "user", "use": "a:b"}, TEXT | {"kind": "user", "use": "a:c"}],
            'data.use is "a:c" on rank 1 and "a:b" on rank 0',
        ),
    ],
)
def test_a_rank_that_reads_other_data_is_named(records, difference):
    message = f"rank 1 (dp_shard 1) reads other data than rank 0: {difference}; give all ranks the same files"
    assert run_ranks(refused, 2, records) == [message] * 2


# ---- streams ---------------------------------------------------------------------------------------------------------

STREAM = """
composer3d = 1
model.args = { dim = 16, num_layers = 1, num_heads = 2, vocab_size = 64 }
data = { use = "streamed:Stream", order = "stream", seq_len = 8, args = ARGS }
train = { steps = 6, global_batch = 4 }
run.device = "cpu"
[sharding.fsdp2]
"""
STREAMED = """
import os
import random


class Stream:
    def __init__(self, length=100, shorter=0, shuffled=False, divided=False):
        rank = int(os.environ["RANK"])
        self.place, self.step = (rank, 2) if divided else (0, 1)
        self.length = length - shorter * rank
        self.rows = [[(row + column) % 64 for column in range(9)] for row in range(self.length)]
        if shuffled:
            random.Random(os.getpid()).shuffle(self.rows)

    def __iter__(self):
        while self.place < self.length:
            self.place += self.step
            yield self.rows[self.place - self.step]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]
"""


@pytest.mark.parametrize(
    ("args", "item"), [("{ divided = true }", 0), ("{ shuffled = true }", None), ("{ length = 10, shorter = 3 }", 7)]
)
def test_a_stream_that_is_not_the_same_on_all_ranks_is_named(args, item, tmp_path):
    (tmp_path / "streamed.py").write_text(STREAMED)
    path = write(tmp_path, STREAM.replace("ARGS", args))
    with pytest.raises(RankError) as caught:
        start(path, 2)
    message = str(caught.value)
    assert '[data] order = "stream": item ' in message and "is another one than that of rank 0; every rank" in message
    assert item is None or f"item {item} of rank 1 (dp_shard 1)" in message


def test_a_stream_that_is_the_same_on_all_ranks_trains(tmp_path):
    (tmp_path / "streamed.py").write_text(STREAMED)
    assert start(write(tmp_path, STREAM.replace("ARGS", "{}")), 2)["status"] == "finished"
