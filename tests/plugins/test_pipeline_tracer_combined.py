"""Traced pipelines with every schedule, files of schedules, frozen stages, mixed precision and compilation."""

from __future__ import annotations

from functools import partial

import pytest
from support.models import VOCAB
from support.pipeline_models import assert_equal_to_one_device, losses_of, pipelined_step
from support.traced_models import Disorder, HalfFrozen, Shared, Unet
from torch import nn

from composer3d.testing import run_ranks

UNET = '[model]\nblocks = "[du]*.[0-9]"\n'  # blocks in two lists


def manifest(schedule="1F1B", more=""):
    return f'[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\nsplit = "tracer"\n{more}'


# ---- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("factory", "more"), [(Shared, ""), (Unet, UNET), (Disorder, "")])
def test_several_stages_a_rank(schedule, factory, more):
    step = partial(pipelined_step, microbatch=2)
    assert_equal_to_one_device(run_ranks(step, 2, manifest(schedule, more), factory))


# Backwards in reverse order and in halves; two stages a rank in a V.
OWN = {
    "reversed": (3, "0F0,0F1,0F2,0F3,,0B3,0B2,0B1,0B0\n,1F0,1F1,1F2,1F3,1I3,1I2,1W3,1I1,1I0,1W2,1W1,1W0\n"),
    "vee": (6, "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("factory", "more"), [(Shared, ""), (Unet, UNET)])
def test_schedules_of_ones_own(name, factory, more, tmp_path):
    microbatch, rows = OWN[name]
    (tmp_path / "own.csv").write_text(rows)
    step = partial(pipelined_step, microbatch=microbatch)
    assert_equal_to_one_device(run_ranks(step, 2, manifest(tmp_path / "own.csv", more), factory))


# ---- frozen stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(("tok", "down"), id="first"),
        pytest.param(("up", "mix", "gate", "out"), id="last"),
        pytest.param(("down.1", "down.2", "up.0", "up.1", "mix.0", "mix.1"), id="middle"),
    ],
)
def test_wholly_frozen_stages(schedule, frozen):
    step = partial(pipelined_step, microbatch=3)
    assert_equal_to_one_device(run_ranks(step, 2, manifest(schedule, UNET), HalfFrozen, {"frozen": frozen}))


# ---- dtypes and compilation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_cuts_nothing_at_stages(dtype, schedule):
    # Code between the blocks is given what came from other stages, in the dtype in which it was made there.
    text = f'[sharding.fsdp2]\n[precision.mixed]\nparam_dtype = "{dtype}"\n'
    (alone,) = run_ranks(losses_of, 1, text, Disorder)
    for losses in run_ranks(losses_of, 2, manifest(schedule, text), Disorder):
        assert losses == pytest.approx(alone, rel=1e-3)
        assert losses[-1] < 0.9 * losses[0]


# Dynamo looks at the .grad of everything that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks():
    (alone,) = run_ranks(losses_of, 1, "", Shared)
    for losses in run_ranks(losses_of, 2, manifest(more='[scheduling.compile]\nbackend = "aot_eager"\n'), Shared):
        assert losses == pytest.approx(alone, rel=1e-4)


# ---- modules that are replaced ---------------------------------------------------------------------------------------

SWAPPED = '[precision.swapped]\nuse = "support.swapped_linears:Swapped"\n'


@pytest.mark.parametrize("factory", [Shared, Disorder])
def test_modules_that_a_precision_replaces_are_called_in_their_place(factory):
    # The head is one: it is called by the forward itself, so the stage counts its calls.
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, manifest(more=SWAPPED), factory))


def linear_chain():
    """Blocks that are linear layers."""
    return nn.Sequential(nn.Embedding(VOCAB, 7), *(nn.Linear(7, 7) for _ in range(4)), nn.Linear(7, VOCAB))


@pytest.mark.parametrize("split", ['"auto"', '"tracer"'])
def test_blocks_that_a_precision_replaces_are_called_in_their_place(split):
    text = f'[mesh]\npp = 2\n[model]\nblocks = "[1-4]"\n[scheduling.pipeline]\nsplit = {split}\n{SWAPPED}'
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, linear_chain))
