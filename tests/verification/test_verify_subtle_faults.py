"""Faults on one rank, in one step, or in the last digits: the proof fails, and says where."""

from __future__ import annotations

import pytest
from support.verification_cases import DDP, FSDP, TP, assert_named, planted

fault = planted("subtle_faults")
SLOW = pytest.mark.slow
AFTER_THE_MODEL = r"every module .* returns .* what one device returns: what comes after the model is to blame"


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            FSDP + fault("communication", "subtle", "shared"),
            {},
            r"the gradients of tok.weight are 2 times the right ones",
            id="a shared parameter counted twice",
        ),
        pytest.param(
            FSDP + fault("communication", "subtle", "narrow"),
            {"own_dtype": True},
            r"the gradients of .* have no more digits than bfloat16: they are rounded on the way",
            id="rounded on the way",
        ),
        pytest.param(
            FSDP + fault("communication", "subtle", "leftover"),
            {"steps": 2},
            r"the gradients of step 1 hold those of step 0 besides: they are not zeroed",
            id="not zeroed",
        ),
        pytest.param(
            DDP + fault("communication", "subtle", "frozen"),
            {},
            r"the copies of layers.0.up.weight drift apart .*; rank 1 \(dp_replicate 1\) leaves them as they are",
            id="frozen on one rank",
        ),
        pytest.param(
            DDP + fault("communication", "subtle", "slow"),
            {},
            r"drift apart along dp_replicate: .*; on rank 1 \(dp_replicate 1\) the updates are 0.5 times the right",
            id="a stale learning rate on one rank",
        ),
        pytest.param(
            FSDP + fault("communication", "subtle", "again"),
            {"grad_clip": 0.01},
            r"gradients are scaled by .* they are scaled after the core has clipped them",
            id="clipped twice",
            marks=SLOW,
        ),
        pytest.param(FSDP + fault("scheduling", "labels", "unmasked"), {"microbatch": 2}, AFTER_THE_MODEL, id="mask"),
        pytest.param(
            FSDP + fault("scheduling", "labels", "shifted"),
            {"microbatch": 2},
            AFTER_THE_MODEL,
            id="shifted targets",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + fault("scheduling", "labels", "rows"),
            {"microbatch": 2},
            AFTER_THE_MODEL,
            id="targets of another micro-batch",
            marks=SLOW,
        ),
        pytest.param(
            TP + fault("scheduling", "scaled"),
            {},
            r"the first module whose output is another one is layers.1.up",
            id="a wrong scale inside what tp cuts",
        ),
        pytest.param(
            FSDP + fault("sharding", "overlapping"),
            {"microbatch": 3},
            r"the model is given another argument 0 than the batch has on rank 1 \(dp_shard 1\)",
            id="a sample twice",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + fault("sharding", "overlapping"),
            {"microbatch": 1},
            r"the samples of micro-batch 5 of data-parallel rank 0 are there twice, and those of micro-batch 0 of "
            r"data-parallel rank 1 are not: the parts of the batch that ranks take overlap",
            id="parts that overlap",
            marks=SLOW,
        ),
    ],
)
def test_a_subtle_fault_is_named(text, options, cause):
    assert_named(text, options, cause)
