"""Models and manifests that are unusual and right: no false alarm."""

from __future__ import annotations

import functools

import pytest
import torch
from support import unusual_models
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, FSDP, batch, planted

from composer3d import Batch
from composer3d.testing import assert_parity

SLOW = pytest.mark.slow
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
PP = '[mesh]\npp = 2\n[model]\nblocks = "layers.*"\n[scheduling.pipeline]\nschedule = "1F1B"\n'
CUT = "[mesh]\ntp = 2\ndp_shard = 2\n[sharding.tensor_parallel]\n[sharding.fsdp2]\n"
ROUNDS = "[mesh]\npp = 2\n" + planted("user_faults")("scheduling", "interleaved")


def grouped(run):
    """Decay and step matrices otherwise than the rest."""
    groups = [{"match": r"norm|bias", "weight_decay": 0.0, "lr": 5e-4}]
    return run.optimizer(torch.optim.AdamW, groups=groups, lr=1e-3, weight_decay=0.1)


def empty():
    """Return a batch of which one micro-batch has nothing to predict."""
    whole = batch()
    targets = whole.target.clone()
    targets[2:4] = -100
    return Batch(args=whole.args, target=targets)


@pytest.mark.parametrize(
    ("text", "factory", "options"),
    [
        pytest.param(
            FSDP + "[precision.mixed]\n",
            unusual_models.experts,
            {"microbatch": 2, "own_dtype": True},
            id="experts",
            marks=SLOW,
        ),
        pytest.param(DDP, unusual_models.experts, {"microbatch": 1}, id="experts, replicated", marks=SLOW),
        pytest.param(
            CUT, unusual_models.window, {"microbatch": 3}, id="grouped queries with a window, cut", marks=SLOW
        ),
        pytest.param(PP, unusual_models.bare, {"microbatch": 3}, id="blocks without parameters, pipelined", marks=SLOW),
        pytest.param(
            FSDP + "[scheduling.activation_checkpoint]\n",
            unusual_models.shared,
            {"microbatch": 3},
            id="a block twice, recomputed",
            marks=SLOW,
        ),
        pytest.param(
            PP + 'split = "tracer"\n', unusual_models.shared, {"microbatch": 4}, id="a block on two stages", marks=SLOW
        ),
        pytest.param(
            HYBRID, unusual_models.mixture, {"microbatch": 3}, id="convolutions and a recurrent net", marks=SLOW
        ),
        pytest.param(DDP, unusual_models.mixture, {"microbatch": 2}, id="the same, replicated", marks=SLOW),
        pytest.param(FSDP, unusual_models.hooked, {"microbatch": 3}, id="a hook that halves gradients", marks=SLOW),
        pytest.param(FSDP, unusual_models.Counted, {"microbatch": 2}, id="a buffer that counts", marks=SLOW),
        pytest.param(
            FSDP, unusual_models.Halves, {"optimizer": grouped}, id="half of it frozen, in groups", marks=SLOW
        ),
        pytest.param(PP, unusual_models.Halves, {"microbatch": 3}, id="half of it frozen, pipelined"),
        pytest.param(PP, unusual_models.Between, {"microbatch": 3}, id="modules between stages without parameters"),
        pytest.param(FSDP, Even, {"optimizer": grouped, "microbatch": 3}, id="groups", marks=SLOW),
        pytest.param(FSDP, unusual_models.narrow, {}, id="a block in bfloat16", marks=SLOW),
        pytest.param(FSDP, Even, {"batch": empty, "microbatch": 2}, id="nothing to predict in a micro-batch"),
        pytest.param(
            ROUNDS, functools.partial(Even, num_layers=4), {"microbatch": 6}, id="interleaved stages of one's own"
        ),
    ],
)
def test_what_is_unusual_and_right_is_proven(text, factory, options):
    rest = {"own_dtype": False, **{key: value for key, value in options.items() if key != "batch"}}
    made = options.get("batch", batch)()
    verdict = assert_parity(factory, write_manifest(text), made, loss_fn=sum_loss, grad_clip=0.5, **rest).verdict
    assert (verdict.failures, verdict.diagnosis) == ((), ())
