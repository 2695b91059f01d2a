"""Faults that people make, each planted in a plugin or a model: the proof fails, and names the cause."""

from __future__ import annotations

import functools

import pytest
from support.composition_faults import Even, Latent
from support.verification_cases import DDP, FSDP, TP, assert_named, planted

plugin = planted("composition_faults")
CUT = "[mesh]\ntp = 2\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "GPipe"\n'


def spoilt(fault, factor=1.0):
    return plugin("communication", "gradients", fault, factor=factor)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            "[mesh]\ndp_replicate = 2\n" + plugin("sharding", "not_reduced"),
            {"microbatch": 2},
            r"hold the samples of data-parallel rank 0 alone, of 2: a reduction over dp_replicate is missing",
            id="missing all-reduce",
        ),
        pytest.param(
            DDP + spoilt("add_up"),
            {"microbatch": 2},
            r"all gradients are 2 times the right ones; that is dp_replicate = 2: reduced once too often",
            id="double all-reduce",
        ),
        pytest.param(
            FSDP + spoilt("scale", 3.0),
            {"microbatch": 2},
            r"all gradients are 3 times the right ones; that is the 3 micro-batches of a rank: the loss is not divided",
            id="not divided by accumulation steps",
        ),
        pytest.param(
            FSDP + spoilt("clip", 0.01),
            {"grad_clip": 0.01},
            r"all gradients are \S+ times the right ones; that is grad_clip / the norm = 0.01 / \S+: clipped",
            id="clipped before",
        ),
        pytest.param(
            FSDP + spoilt("scale", 1 / 3),
            {"microbatch": 2},
            r"0.333333 times the right ones; that is 1 / the 3 micro-batches of a rank: .* their number twice",
            id="divided twice",
        ),
        pytest.param(
            FSDP + plugin("scheduling", "mean_of_means"),
            {"microbatch": 2},
            r"mean of means: every micro-batch weighs the same",
            id="mean of means",
        ),
        pytest.param(
            FSDP + plugin("sharding", "same_batch"),
            {"microbatch": 2},
            r"hold the samples of data-parallel rank 0 alone, of 2, and are equal on all ranks: .* the same batch",
            id="same batch",
        ),
        pytest.param(
            CUT + plugin("sharding", "hand_made", "nothing"),
            {},
            r"the owner of tp did nothing",
            id="silent pattern",
        ),
        pytest.param(
            CUT + plugin("sharding", "hand_made", "bias"),
            {},
            r"layers.0.down.bias, layers.1.down.bias: added 2 times, once a rank along tp before the reduction",
            id="rowwise bias",
        ),
        pytest.param(
            TP,
            {"factory": functools.partial(Even, block=Latent)},
            r"a part of the gradients of .*layers.1.kv.weight is partial over tp",
            id="latent attention",
        ),
        pytest.param(
            CUT
            + "[sharding.tensor_parallel]\nsequence_parallel = true\n"
            + 'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise", "layers.*.norm" = "sequence", '
            + '"layers.*" = "split_gather", tok = "replicate", out = "replicate" }\n'
            + spoilt("unreduced_norms"),
            {},
            r"norm\.(bias|weight).* are partial over tp: added up over its ranks they are right",
            id="norm under sequence parallel",
        ),
    ],
)
def test_a_wrong_gradient_is_explained(text, options, cause):
    assert_named(text, options, cause)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            PP + spoilt("lost_stage", 0.0),
            {"microbatch": 6},
            r"the gradients of stage pp = 1 are missing",
            id="a stage's gradients",
        ),
        pytest.param(
            PP + spoilt("untied"),
            {"microbatch": 6, "factory": functools.partial(Even, tied=True)},
            r"the copies of the tied parameter tok.weight on several stages",
            id="tied head",
        ),
        pytest.param(
            '[mesh]\npp = 2\ndp_shard = 2\n[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n[sharding.fsdp2]\n'
            + plugin("scheduling", "freed"),
            {"microbatch": 1, "factory": functools.partial(Even, num_layers=4)},
            r"the schedule needs parameters unsharded .* \(zero bubble\), and they are freed in between",
            id="zero bubble and resharding",
        ),
    ],
)
def test_a_wrong_stage_is_explained(text, options, cause):
    assert_named(text, options, cause)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        pytest.param(
            FSDP + "[scheduling.activation_checkpoint]\npreserve_rng_state = false\n",
            r"computed again in the backward draws other random numbers .* layers.0.dropout:dropout, layers.1",
            id="another mask",
        ),
        pytest.param(
            FSDP + plugin("scheduling", "seeded", "ranks"),
            r"ranks along dp_shard draw the same random numbers at layers.0.dropout:dropout",
            id="equal on all ranks",
        ),
        pytest.param(
            FSDP + plugin("scheduling", "seeded", "microbatches"),
            r"micro-batches draw the same random numbers at layers.0.dropout:dropout",
            id="equal in all micro-batches",
        ),
        pytest.param(
            TP + plugin("scheduling", "seeded", "microbatches"),
            r"ranks along tp draw other random numbers at layers.0.dropout:dropout",
            id="different along tp",
        ),
    ],
)
def test_wrong_random_numbers_are_found(text, cause):
    told = assert_named(text, {"factory": functools.partial(Even, dropout=0.3), "microbatch": 3}, cause)
    assert "gradients differ" not in told


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            FSDP + plugin("communication", "local_clip", norm=0.1),
            {"grad_clip": 0.1},
            r"every rank clips by its local norm",
            id="local norm",
        ),
        pytest.param(
            FSDP + plugin("communication", "forgetful"),
            {},
            r"the optimizer skips layers.0.norm.bias, layers.0.norm.weight",
            id="skipped group",
        ),
        pytest.param(
            DDP + plugin("communication", "drift", axis='"dp_replicate"'),
            {},
            r"the copies of .* drift apart along dp_replicate: their ranks update them differently",
            id="drift",
        ),
    ],
)
def test_a_wrong_update_is_explained(text, options, cause):
    assert " gradients differ" not in assert_named(text, options, cause)
