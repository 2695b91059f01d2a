"""Faults of single ranks and of what is kept between steps: named where they are wrong, and no alarm where right."""

from __future__ import annotations

import functools

import pytest
import torch
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.stateful_faults import Bags, Cached, Chosen, Normed, Numbered, Positioned, Warming
from support.stepping_faults import adamw_with, eager
from support.verification_cases import DDP, FSDP, assert_named, batch, planted

from composer3d import Batch
from composer3d.testing import assert_parity

keeping, stepping = planted("stateful_faults"), planted("stepping_faults")
SLOW = pytest.mark.slow
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
CP, TP, OWN = "[mesh]\ncp = 2\n", "[mesh]\ntp = 2\n", "[mesh]\ndp_replicate = 2\n"
SECOND = r"from the same gradients, only in the pieces of rank 1 \(dp_shard 1\)"
APART = r"drift apart along dp_replicate: .*; rank 1 \(dp_replicate 1\) is wrong"
tied = functools.partial(Even, tied=True)


def of_blocks(block):
    return functools.partial(Even, block=block)


def positioned():
    whole = batch()
    positions = torch.arange(4).expand(12, 4).contiguous()
    return Batch(args=whole.args, kwargs={"positions": positions}, target=whole.target)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(FSDP, {"optimizer": adamw_with(eps=1e-3)}, SECOND, id="another eps"),
        pytest.param(
            FSDP,
            {"optimizer": adamw_with(lr=2e-3)},
            r"are 2 times the right ones, .* the learning rate is another one, .*, only in the pieces of rank 1",
            id="another rate, sharded",
        ),
        pytest.param(FSDP, {"optimizer": adamw_with(weight_decay=0.5)}, SECOND, id="another decay", marks=SLOW),
        pytest.param(
            FSDP,
            {"optimizer": adamw_with(betas=(0.8, 0.99)), "steps": 2},
            "otherwise than on one device in step 1, after right ones, " + SECOND,
            id="other betas, which the first step does not show",
        ),
        pytest.param(DDP, {"optimizer": adamw_with(eps=1e-3)}, APART, id="another eps, replicated", marks=SLOW),
        pytest.param(
            PP,
            {"optimizer": adamw_with(lr=2e-3), "microbatch": 6},
            r"the updates of layers.1.down.bias, .* are 2 times the right ones",
            id="another rate on one stage",
            marks=SLOW,
        ),
        pytest.param(
            DDP,
            {"optimizer": eager},
            r"on rank 1 \(dp_replicate 1\) the updates are 2 times the right ones",
            id="two steps on one rank",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + stepping("communication", "groups", "twice"),
            {},
            r"the updates of tok.weight are 2 times the right ones, from the same gradients: .* more than once",
            id="a parameter that the optimizer has twice",
            marks=pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate"),
        ),
        pytest.param(
            PP + stepping("communication", "on_stage", "scale"),
            {"microbatch": 6},
            r"of all gradients those of layers.1.down.bias, .* alone are wrong",
            id="the scale of one stage",
            marks=SLOW,
        ),
        pytest.param(
            PP + stepping("communication", "on_stage", "clip"),
            {"microbatch": 6, "grad_clip": 0.01},
            r"scaled by \S+ on rank 1 between .* clipped to another norm there, or scaled by some number; the other",
            id="the clipping of one stage",
        ),
        pytest.param(
            OWN + stepping("sharding", "owners", "stale"),
            {},
            r"each is updated on some ranks, and the others have it as it was: updated shards are not handed over",
            id="stale shards",
        ),
        pytest.param(
            FSDP + stepping("communication", "largest", share=0.5),
            {},
            r"are the right ones, some of them replaced by zero",
            id="compressed on all ranks",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + stepping("sharding", "frozen_here", ranks=[1]),
            {"steps": 2},
            r"layers.0.up.bias, layers.0.up.weight gets a gradient on rank 0 \(dp_shard 0\) and none on rank 1",
            id="frozen before it is cut",
            marks=SLOW,
        ),
        pytest.param(
            DDP + stepping("sharding", "frozen_here", ranks=[1], phase='"after"'),
            {"steps": 2},
            r"layers.0.up.bias, layers.0.up.weight gets a gradient on rank 0 \(dp_replicate 0\) and none on rank 1",
            id="frozen afterwards",
            marks=SLOW,
        ),
    ],
)
def test_a_step_that_is_wrong_on_one_rank_is_named(text, options, cause):
    assert_named(text, options, cause)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            DDP,
            {"factory": of_blocks(Cached), "steps": 2},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_replicate 1\)",
            id="kept from step to step",
            marks=SLOW,
        ),
        pytest.param(
            FSDP,
            {"factory": of_blocks(Warming), "microbatch": 3},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_shard 1\)",
            id="grows with its forwards",
            marks=SLOW,
        ),
        pytest.param(
            FSDP,
            {"factory": of_blocks(functools.partial(Chosen, apart=True))},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_shard 1\)",
            id="another number of experts",
        ),
        pytest.param(
            CP + keeping("sharding", "pieces"),
            {"factory": of_blocks(Bags)},
            r"the first module whose output is another one is layers.0",
            id="added by a rank's own index",
        ),
        pytest.param(
            CP + keeping("sharding", "pieces", "labels"),
            {},
            r"the loss is given other targets than the batch has",
            id="labels of one rank",
            marks=SLOW,
        ),
        pytest.param(
            CP + keeping("sharding", "pieces"),
            {"factory": Numbered},
            r"the first module whose output is another one is places",
            id="positions that begin anew on every rank",
            marks=SLOW,
        ),
        pytest.param(
            TP + keeping("sharding", "cut_norm", "local"),
            {"factory": of_blocks(Normed)},
            r"the first module whose output is another one is layers.0.norm",
            id="a norm by a rank's own features",
            marks=SLOW,
        ),
        *(
            pytest.param(
                PP + keeping("scheduling", "wire", fault, dtype='"float16"'),
                {"microbatch": 6, "own_dtype": True},
                r"in float64 everything is right, .* rounded more than on one device, about as much as float16",
                id=f"rounded between stages, {fault}",
                marks=marks,
            )
            for fault, marks in (("forward", ()), ("backward", SLOW), ("narrow", SLOW))
        ),
        pytest.param(
            FSDP + keeping("scheduling", "merged", "halves"),
            {"microbatch": 3},
            r"the micro-batches 1 of every rank do not count",
            id="half of the micro-batches twice",
            marks=SLOW,
        ),
        pytest.param(
            OWN + keeping("sharding", "claims", "sums"),
            {},
            r"all gradients are 2 times the right ones; that is dp_replicate = 2: .* not averaged",
            id="sums, and says that it averages",
        ),
        pytest.param(
            OWN + keeping("sharding", "claims", "averages"),
            {},
            r"all gradients are 0.5 times the right ones; that is 1 / dp_replicate = 1 / 2",
            id="averages, and says that it sums up",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + keeping("sharding", "placing"),
            {},
            r"the ranks together train on 29 valid tokens, 8 fewer than the batch has",
            id="a sample fewer",
            marks=SLOW,
        ),
    ],
)
def test_a_forward_that_is_wrong_in_some_place_is_named(text, options, cause):
    assert_named(text, options, cause)


def test_a_plugin_of_precision_that_changes_gradients_is_compared_with_itself_on_one_device():
    text = OWN + stepping("sharding", "owners")
    options = {"loss_fn": sum_loss, "microbatch": 3}
    assert_parity(Even, write_manifest(text + keeping("precision", "clamp")), batch(), **options)
    # Each rank's own gradients, clamped and then averaged, are other ones.
    cause = "in the run's dtypes the gradients of .* are other ones, by more than any dtype rounds: .* before gradients"
    assert_named(text + keeping("precision", "clamp", "early"), {"own_dtype": True, "microbatch": 3}, cause)


def test_positions_that_a_plugin_counts_anew_are_named():
    path = write_manifest(CP + keeping("sharding", "pieces", "positions"))
    with pytest.raises(AssertionError, match=r"likely: the model is given another argument positions than the batch"):
        assert_parity(Positioned, path, positioned(), loss_fn=sum_loss, steps=1, own_dtype=False)


@pytest.mark.parametrize(
    ("text", "factory", "options"),
    [
        pytest.param(FSDP + stepping("communication", "groups"), Even, {}, id="a group a parameter", marks=SLOW),
        pytest.param(OWN + stepping("sharding", "owners"), Even, {}, id="updated shards", marks=SLOW),
        pytest.param(FSDP, tied, {}, id="tied", marks=SLOW),
        pytest.param(
            FSDP + stepping("communication", "untied"), tied, {"steps": 3}, id="ties that the core ties again"
        ),
        pytest.param(FSDP + stepping("communication", "largest", share=1.0), Even, {}, id="all of it", marks=SLOW),
        pytest.param(FSDP + stepping("sharding", "frozen_here", ranks=[]), Even, {}, id="frozen nowhere", marks=SLOW),
        pytest.param(FSDP, of_blocks(Chosen), {}, id="experts", marks=SLOW),
        pytest.param(CP + keeping("sharding", "pieces", bags="true"), of_blocks(Bags), {}, id="added over the group"),
        pytest.param(TP + keeping("sharding", "cut_norm"), of_blocks(Normed), {}, id="a norm of all features"),
        pytest.param(
            CP + keeping("sharding", "pieces"), Positioned, {"batch": positioned}, id="positions, cut", marks=SLOW
        ),
        pytest.param(FSDP + keeping("scheduling", "merged"), Even, {"microbatch": 3}, id="two micro-batches at a time"),
        pytest.param(
            PP + "[precision.mixed]\n" + keeping("scheduling", "wire", "narrow"),
            Even,
            {"microbatch": 6, "own_dtype": True},
            id="bfloat16 between stages that compute in it",
            marks=SLOW,
        ),
    ],
)
def test_what_looks_like_it_and_is_right_is_proven(text, factory, options):
    options = {"loss_fn": sum_loss, "steps": 2, "own_dtype": False, "batch": batch, **options}
    assert_parity(factory, write_manifest(text), options.pop("batch")(), **options)
