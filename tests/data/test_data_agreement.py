from __future__ import annotations

import pytest
import torch.distributed as dist
from support.models import composed

from composer3d import StepError
from composer3d.runner.data.agreement import agree_on_data
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
