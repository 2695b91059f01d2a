"""Faults that have a place: the proof fails, and names the module, the piece, the micro-batch or the step."""

from __future__ import annotations

import functools

import pytest
import torch
from support.composition_faults import Even
from support.located_faults import Grouped, Odd, Positions, Routed, balance_by_rank
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, FSDP, assert_named, batch, planted

from composer3d.testing import assert_parity

fault = planted("located_faults")
SLOW = pytest.mark.slow
CP = "[mesh]\ncp = 2\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
TP = "[mesh]\ntp = 2\n"
TP_4 = "[mesh]\ntp = 4\n"


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            TP + fault("sharding", "cut", "vocabulary"),
            {},
            r"the first module whose output is another one is tok$",
            id="a wrong offset into the vocabulary",
        ),
        pytest.param(
            CP + fault("sharding", "sequence"),
            {"factory": functools.partial(Even, block=Positions)},
            r"the first module whose output is another one is layers.0.up$",
            id="positions from zero on every rank",
        ),
        pytest.param(
            CP + fault("sharding", "sequence", "shifted"),
            {},
            r"what comes after the model is to blame: the loss is given other targets than the batch has: .* shift",
            id="targets shifted after the cut",
        ),
        pytest.param(
            DDP + fault("scheduling", "block", "later"),
            {"microbatch": 2},
            r"the first module whose output is another one is layers.1.norm, first in micro-batch 2",
            id="a later micro-batch",
        ),
        pytest.param(
            TP_4 + fault("sharding", "cut", "head"),
            {"factory": functools.partial(Even, block=Grouped)},
            r"the first module whose output is another one is layers.0",
            id="the keys of another head",
            marks=SLOW,
        ),
        pytest.param(
            TP + fault("sharding", "cut", "packed"),
            {"factory": functools.partial(Even, block=functools.partial(Grouped, packed=True))},
            r"the first module whose output is another one is layers.0",
            id="a packed projection cut across its parts",
            marks=SLOW,
        ),
    ],
)
def test_a_wrong_output_is_placed(text, options, cause):
    assert_named(text, options, f"(?m:{cause})")


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            FSDP + fault("communication", "placed", "piece"),
            {"steps": 2},
            r"those of layers.0.up.weight alone are wrong, only in the pieces of rank 1 \(dp_shard 1\)",
            id="one rank's piece",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "row"),
            {"factory": functools.partial(Even, dim=7, block=Odd)},
            r"those of layers.0.up.weight alone are wrong, only in the pieces of rank 1 \(dp_shard 1\): row 14 of "
            r"layers.0.up.weight$",
            id="the last row of the shorter shard",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "lost"),
            {"factory": functools.partial(Even, dim=7, block=Odd)},
            r"are the right ones, some of them replaced by zero, only in the pieces of rank 1 \(dp_shard 1\): row 6 of "
            r"layers.0.down.bias, row 6 of layers.0.down.weight, row 6 of layers.0.norm.bias, row 6 of "
            r"layers.0.norm.weight and 10 more$",
            id="the last rows of all shorter shards",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "nan"),
            {},
            r"the gradients of .* are not finite",
            id="no number",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "parameter"),
            {},
            r"the loss is right, and of all gradients those of layers.0.up.weight alone are wrong",
            id="one parameter's",
            marks=SLOW,
        ),
        pytest.param(
            PP + fault("scheduling", "block", "late_gradient"),
            {"microbatch": 4},
            r"all gradients down to layers.1.norm: the backward goes wrong between it and layers.0.down",
            id="what one stage does not send back",
            marks=pytest.mark.skipif(
                torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
                reason="torch 2.11 itself fails where a stage has nothing to send back",
            ),
        ),
        pytest.param(
            DDP + fault("scheduling", "block", "recomputed"),
            {"microbatch": 3},
            r"all gradients down to out: the backward goes wrong between it and layers.1.down",
            id="computed again from another input",
            marks=SLOW,
        ),
        pytest.param(
            TP + fault("sharding", "cut", "twice"),
            {},
            r"all gradients down to out: the backward goes wrong between it and layers.1.down, whose weight",
            id="added up twice",
            marks=SLOW,
        ),
        pytest.param(
            TP_4 + fault("sharding", "cut", "keys"),
            {"factory": functools.partial(Even, block=Grouped)},
            r"layers.0.k.weight.* are partial over tp: added up over its ranks they are right",
            id="fewer heads of keys than ranks",
            marks=SLOW,
        ),
        pytest.param(
            DDP,
            {"factory": Routed, "loss_fn": balance_by_rank, "microbatch": 3},
            r"the auxiliary loss weighs 2 times what it should, .*; that is dp_replicate = 2",
            id="a balance counted once a rank",
        ),
        pytest.param(
            "[mesh]\ndp_replicate = 2\ndp_shard = 2\n" + fault("sharding", "half"),
            {"microbatch": 3},
            r"samples of data-parallel rank 0 and 1 alone, of 4: a reduction over dp_replicate is missing",
            id="half of a hybrid reduction",
            marks=SLOW,
        ),
    ],
)
def test_a_wrong_gradient_is_placed(text, options, cause):
    assert_named(text, options, f"(?m:{cause})")


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            FSDP + fault("communication", "placed", "rate"),
            {"steps": 2},
            r"the updates of layers.0.up.bias, layers.0.up.weight, layers.1.up.bias, .* are 10 times the right ones",
            id="the rate of one group",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "state"),
            {"steps": 2},
            r"otherwise than on one device in step 1, after right ones, .* only in the pieces of rank 1 \(dp_shard 1\)",
            id="a shard's state is lost",
        ),
        pytest.param(
            FSDP + fault("communication", "placed", "kept"),
            {"factory": functools.partial(Even, dim=7, block=Odd)},
            r" are not updated, where the gradients are right, only in the pieces of rank 1 \(dp_shard 1\): row 6 of "
            r"layers.0.down.bias, row 6 of layers.0.down.weight, row 6 of layers.0.norm.bias, ",
            id="the last rows are not updated",
        ),
        pytest.param(
            DDP + fault("communication", "placed", "stale"),
            {"steps": 2},
            r"the loss of step 1 is another one, with right updates before it",
            id="parameters of the step before",
            marks=SLOW,
        ),
    ],
)
def test_a_wrong_step_is_placed(text, options, cause):
    assert_named(text, options, cause)


def test_a_gradient_that_is_zero_by_mathematics_is_no_alarm():
    """The bias of keys changes nothing: what its gradient holds is rounding, of which AdamW makes full steps."""
    factory = functools.partial(Even, block=Grouped)
    path = write_manifest("[mesh]\ndp_replicate = 2\n[sharding.ddp]\n")
    verdict = assert_parity(factory, path, batch(), loss_fn=sum_loss, microbatch=3, own_dtype=False).verdict
    limits = verdict.evidence.reference.tolerances["float64"]
    assert limits.of("parameters", "layers.0.k.bias") > 1e-12 >= limits.of("parameters", "layers.0.o.weight")
