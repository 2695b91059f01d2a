"""Faults of users' own models, losses and plugins: the proof fails, and says what was done, where, on which rank."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.user_faults import (
    Branching,
    Detaching,
    Frozen,
    Hasty,
    LayerDrop,
    Lazy,
    Masked,
    Remembering,
    StochasticDepth,
    vocabulary_loss,
)
from support.verification_cases import DDP, FSDP, assert_named, batch, launch, layout_of, planted, subject

from composer3d import Batch
from composer3d.runner.weights.ema import EMA
from composer3d.testing import assert_parity

located, own, users = (planted(f"{name}_faults") for name in ("located", "plugin", "user"))
SLOW = pytest.mark.slow
OWN = "[mesh]\ndp_replicate = 2\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
ROUNDS, CP, TP = "[mesh]\npp = 2\n", "[mesh]\ncp = 2\n", "[mesh]\ntp = 2\n"


def of_blocks(block, **options):
    return functools.partial(Even, block=block, **options)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            DDP,
            {"factory": of_blocks(LayerDrop), "microbatch": 2},
            r"computes something else each time, on one device too, .*: it draws others \(random, numpy",
            id="a generator that torch does not know",
        ),
        pytest.param(
            FSDP,
            {"factory": of_blocks(Branching)},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_shard 1\)",
            id="a branch that leaves parameters out on one rank",
        ),
        pytest.param(
            DDP,
            {"factory": of_blocks(Branching)},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_replicate 1\)",
            id="the same, replicated",
            marks=SLOW,
        ),
        pytest.param(
            FSDP,
            {"factory": of_blocks(Lazy)},
            r"layers.0.extra, layers.1.extra is made in the first forward",
            id="lazy",
            marks=SLOW,
        ),
        pytest.param(
            FSDP,
            {"factory": of_blocks(Detaching)},
            r"the gradients of 7 parameters, .* hold the samples of data-parallel rank 0 alone, of 2",
            id="detached on one rank",
        ),
        pytest.param(
            DDP,
            {"factory": of_blocks(Remembering), "microbatch": 2},
            r"the first module whose output is another one is layers.0 on rank 1 \(dp_replicate 1\)",
            id="kept from micro-batch to micro-batch",
            marks=SLOW,
        ),
        pytest.param(
            TP + users("sharding", "columns"),
            {"loss_fn": vocabulary_loss(lambda rank, size: rank * (size + 1))},
            r"what comes after the model is to blame: the loss returns another value, from the same targets and right",
            id="a wrong offset in a cross entropy over sharded logits",
        ),
        pytest.param(
            PP,
            {"factory": Hasty, "microbatch": 2},
            r"the buffers statistics.running_mean, statistics.running_var are updated more or less often",
            id="running statistics by another rule, alike on all ranks",
        ),
        pytest.param(
            ROUNDS + users("scheduling", "interleaved", "order"),
            {"factory": functools.partial(Even, num_layers=4), "microbatch": 6},
            r"the first module whose output is another one is layers.1",
            id="interleaved stages in another order",
        ),
    ],
)
def test_a_fault_of_a_model_is_named(text, options, cause):
    assert_named(text, options, f"(?m:{cause})")


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            OWN + own("sharding", "own", "compressed"),
            {},
            r"of what data-parallel rank 1 adds to all gradients some elements are not there, .* compression",
            id="compressed on one rank",
        ),
        pytest.param(
            OWN + own("sharding", "own", "twice"),
            {},
            r"all gradients are 0.5 times the right ones; that is 1 / dp_replicate = 1 / 2: averaged once too often",
            id="an average averaged",
            marks=SLOW,
        ),
        pytest.param(
            OWN + own("sharding", "own", "forgotten"),
            {},
            r"the gradients of layers.0.up.bias, layers.0.up.weight on rank 0 hold the samples of data-parallel rank 0 "
            r"alone, of 2: a reduction over dp_replicate is missing",
            id="one layer is not reduced",
            marks=SLOW,
        ),
        pytest.param(
            OWN + own("sharding", "own", "clipped"),
            {"microbatch": 2},
            r"the micro-batches weigh .* each is scaled by itself before all are accumulated, as by clipping",
            id="clipped before all is accumulated",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + own("communication", "elements", "absolute"),
            {},
            r"the gradients of .* and 10 more are the absolute values of the right ones",
            id="absolute values",
        ),
        pytest.param(
            FSDP + own("communication", "elements", "cut"),
            {},
            r"are the right ones, each cut off at 0.01",
            id="each value cut off",
            marks=SLOW,
        ),
        pytest.param(
            DDP + own("communication", "elements", "swapped"),
            {},
            r"the gradients of layers.0.up.weight are those of layers.1.up.weight",
            id="of another layer",
            marks=SLOW,
        ),
        pytest.param(
            DDP + own("communication", "elements", "late"),
            {"steps": 2},
            r"the gradients of .* in step 1 are those of step 0: used a step late",
            id="a step late",
            marks=SLOW,
        ),
        pytest.param(
            DDP + own("communication", "elements", "cut_late"),
            {"grad_clip": 0.05},
            r"no single number on rank 0.*: they are changed element by element",
            id="each value cut off after clipping",
            marks=SLOW,
        ),
        pytest.param(
            PP + own("communication", "elements", "shared"),
            {"factory": functools.partial(Even, tied=True), "microbatch": 4},
            r"tok.weight are 2 times the right ones; that is pp = 2: the copies of a parameter that several stages",
            id="a tied gradient twice",
            marks=SLOW,
        ),
        pytest.param(
            DDP + own("scheduling", "trained", "thawed"),
            {"factory": Frozen},
            r"tok.weight has a gradient, and none on one device: it is frozen there",
            id="trains what is frozen",
            marks=SLOW,
        ),
        pytest.param(
            FSDP + own("scheduling", "trained", "narrow"),
            {"own_dtype": True, "microbatch": 2},
            r"the gradients of .* are rounded more than on one device, about as much as bfloat16 rounds",
            id="reduced in bfloat16",
            marks=SLOW,
        ),
        pytest.param(
            PP + own("scheduling", "trained", "scaled"),
            {"microbatch": 4},
            r"the micro-batches weigh (3, 1, 1|1, 3, 1|1, 1, 3) in all gradients",
            id="the loss of one micro-batch scaled on the last stage",
            marks=SLOW,
        ),
    ],
)
def test_a_fault_of_a_plugin_is_named(text, options, cause):
    assert_named(text, options, cause)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("doubled", r"the ranks together train on 74 valid tokens, 2 times the batch has: .*composer3d_place_batch"),
        pytest.param(
            "permuted", r"the model is given another argument 0 than the batch has: another order", marks=SLOW
        ),
    ],
)
def test_samples_that_are_placed_wrongly_are_named(fault, cause):
    assert_named(FSDP + own("sharding", "placing", fault), {}, cause)


def masked():
    whole = batch()
    mask = torch.randint(0, 2, whole.args[0].shape, generator=torch.Generator().manual_seed(5)).float()
    return Batch(args=whole.args, kwargs={"mask": mask}, target=whole.target)


@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=SLOW)])
def test_a_mask_that_is_sharded_along_another_dim_is_named(dim):
    path = write_manifest(CP + located("sharding", "sequence", kwargs_dim=dim))
    options = {"loss_fn": sum_loss, "steps": 1, "own_dtype": False}
    if dim == 1:
        assert_parity(Masked, path, masked(), **options)
        return
    with pytest.raises(AssertionError, match=r"likely: the model is given another argument mask than the batch has"):
        assert_parity(Masked, path, masked(), **options)


class Forgetful(EMA):
    """Takes in the weights on the first rank alone."""

    def update(self, step):
        if self._run.context.rank == 0:
            super().update(step)


def averaging(text, make_averages):
    made = subject(text, batch=half, loss_fn=sum_loss, factory=Even)
    return made.__class__(**{**vars(made), "make_averages": make_averages, "decay": 0.75})


def half(step, rank, degree):
    whole, size = batch(), 12 // degree
    cut = slice(rank * size, (rank + 1) * size)
    return Batch(args=(whole.args[0][cut],), target=whole.target[cut])


@pytest.mark.parametrize(
    ("text", "make_averages", "cause"),
    [
        pytest.param(FSDP, lambda run: EMA(run, decay=0.75), "", id="right", marks=SLOW),
        pytest.param(
            FSDP,
            lambda run: EMA(run, decay=0.5),
            "are wrong in step 0, of right weights: they take in 0.5 of the weights in step 0, another decay",
            id="another decay",
        ),
        pytest.param(
            FSDP,
            lambda run: EMA(run, decay=0.75, every=3),
            "of right weights: they are not updated",
            id="not updated",
            marks=SLOW,
        ),
        pytest.param(
            FSDP,
            lambda run: Forgetful(run, decay=0.75),
            "only in the pieces of rank 1 (dp_shard 1)",
            id="on one rank",
            marks=SLOW,
        ),
        pytest.param(
            DDP,
            lambda run: Forgetful(run, decay=0.75),
            "differ along dp_replicate, of equal weights",
            id="on one replica",
        ),
    ],
)
def test_moving_averages_are_those_of_one_device(text, make_averages, cause):
    from composer3d.verification import prove

    verdict = prove(
        functools.partial(averaging, text, make_averages),
        layout=layout_of(text),
        launch=launch,
        num_steps=2,
        microbatches=1,
        grad_clip=math.inf,
        passes=("float64",),
    )
    assert verdict.ok == (not cause), verdict.failures
    assert any(cause in line for line in verdict.diagnosis) == bool(cause), verdict.diagnosis


@pytest.mark.slow
def test_layers_that_a_number_of_torchs_leaves_out_are_no_fault():
    """All ranks draw a number that has no samples alike, as one device does."""
    text = FSDP + "[scheduling.activation_checkpoint]\n"
    assert_parity(
        of_blocks(StochasticDepth), write_manifest(text), batch(), loss_fn=sum_loss, microbatch=2, own_dtype=False
    )
