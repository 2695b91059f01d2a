"""Faults that are on nobody's list: the proof fails, and names what it can."""

from __future__ import annotations

import functools
import math

import pytest
from support.composition_faults import Even
from support.models import sum_loss
from support.verification_cases import DDP, FSDP, TP, assert_named, batch, planted

fault = planted("rare_faults")
LOCKSTEP = '[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'
CASES = {
    "averaged over another axis": (
        "[mesh]\ndp_replicate = 2\ntp = 2\n" + LOCKSTEP + fault("sharding", "reduced", "axis"),
        {},
        r"the samples of data-parallel rank 0 alone, of 2: a reduction over dp_replicate is missing",
    ),
    "maximum for a sum": (
        "[mesh]\ndp_replicate = 2\n" + fault("sharding", "reduced", "maximum"),
        {},
        r"the largest that a data-parallel rank has: a reduction over dp_replicate takes the maximum",
    ),
    "not waited for": (
        "[mesh]\ndp_replicate = 2\n" + fault("sharding", "reduced", "waiting"),
        {},
        r"the samples of data-parallel rank 0 alone, of 2: a reduction over dp_replicate is missing",
    ),
    "root of the degree": (
        DDP
        + '[communication.gradients]\nuse = "support.composition_faults:Gradients"\nfault = "scale"\n'
        + f"factor = {math.sqrt(0.5)}\n",
        {},
        r"all gradients are 0.707107 times the right ones; that is 1 / the root of dp_replicate = 2",
    ),
    "learning rate twice": (
        FSDP + fault("communication", "update", "twice"),
        {},
        r"the updates of .* are 2 times the right ones, .* the learning rate",
    ),
    "another group's decay": (
        FSDP + fault("communication", "update", "decay"),
        {},
        r"the updates of layers.0.norm.weight, layers.1.norm.weight are off by -0.001 times the parameters",
    ),
    "not clipped": (
        DDP + fault("communication", "unclip"),
        {"grad_clip": 0.01},
        r"gradients are scaled by 1 on rank 0, .* they are not clipped",
    ),
    "another seed": (
        DDP + fault("communication", "weights", "seed"),
        {},
        r"rank 1 \(dp_replicate 1\) begins with other weights than one device",
    ),
    "swapped pieces": (
        TP + fault("communication", "weights", "swapped"),
        {},
        r"the pieces of layers.0.up.weight, layers.1.up.weight lie in another order along tp",
    ),
    "dropped twice": (
        FSDP + fault("scheduling", "hooked", "dropped"),
        {},
        r"random numbers are drawn at layers.1:dropout more often than on one device",
    ),
    "not dropped": (
        FSDP + fault("scheduling", "hooked", "undropped"),
        {"factory": functools.partial(Even, dropout=0.3)},
        r"no rank draws random numbers at layers.1.dropout:dropout",
    ),
    "dropped less": (
        FSDP + fault("scheduling", "hooked", "rarely"),
        {"factory": functools.partial(Even, dropout=0.3)},
        r"something is dropped at layers.1.dropout:dropout with another probability than on one device",
    ),
    "detached": (FSDP + fault("scheduling", "hooked", "detached"), {}, r"no gradient reaches .*layers.0"),
    "changed in place": (
        FSDP + fault("scheduling", "hooked", "in_place"),
        {},
        r"the first module whose output is another one is layers.1.norm",
    ),
    "a micro-batch left out": (
        FSDP + fault("scheduling", "counting", "dropped"),
        {"microbatch": 2},
        r"the micro-batches 2 of every rank do not count in all gradients",
    ),
    "a micro-batch twice": (
        FSDP + fault("scheduling", "counting", "twice"),
        {"microbatch": 2},
        r"the micro-batches 2 of every rank are counted twice",
    ),
}


# Found by the same evidence as one of the others.
REPEATED = {
    "another group's decay",
    "averaged over another axis",
    "a micro-batch twice",
    "changed in place",
    "dropped less",
    "dropped twice",
    "not dropped",
    "not waited for",
    "root of the degree",
}


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in REPEATED else [])
        for name, case in CASES.items()
    ],
)
def test_a_fault_that_nobody_listed_is_named(text, options, cause):
    assert_named(text, options, cause)


def test_scales_that_are_computed_before_parameters_are_averaged_are_stale():
    told = assert_named(
        "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
        + '[precision.float8]\nall_gather = true\nmodules = ["layers.*.up", "layers.*.down"]\n'
        + fault("communication", "late_average"),
        {"factory": functools.partial(Even, dim=16), "own_dtype": True},
        r"layers.0.down.weight.precomputed_scale, .* is stale: parameters were changed after it .* averaging",
    )
    assert "in float64" not in told


def test_a_source_that_hands_all_ranks_the_same_batch_is_named():
    from support.verification_cases import launch, layout_of, subject

    from composer3d.verification import prove

    text = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[train]\nmicrobatch = 6\n"
    make = functools.partial(subject, text, batch=lambda step, rank, degree: batch(), loss_fn=sum_loss, factory=Even)
    verdict = prove(
        make,
        layout=layout_of(text),
        launch=launch,
        num_steps=1,
        microbatches=2,
        grad_clip=math.inf,
        passes=("float64",),
    )
    assert verdict.failures == ("the data-parallel ranks of rank 0 and rank 1 are given the same batch in step 0",)
    assert verdict.diagnosis[0].startswith("the data source hands the same batch to ranks that differ in dp_shard")
