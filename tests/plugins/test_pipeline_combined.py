"""Pipelines with data parallelism, mixed precision and compilation."""

from __future__ import annotations

from functools import partial

import pytest
from support.models import Net, composed, mine, padded, seeded
from support.pipeline_models import assert_equal_to_one_device, losses_of, pipelined_step

from composer3d.testing import count_collectives, run_ranks

DATA_PARALLEL = {
    "zero1": "[sharding.fsdp2]\nzero = 1\n",
    "zero2": "[sharding.fsdp2]\nzero = 2\n",
    "zero3": "[sharding.fsdp2]\nzero = 3\n",
    "unit": "[sharding.ddp]\n",
    "reshard2": "[sharding.fsdp2]\nreshard_root = true\nreshard_after_forward = true\n",
}
FAST, SLOW = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), ("GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV")


def manifest(schedule, data_parallel, more=""):
    axis = "dp_replicate" if "ddp" in data_parallel else "dp_shard"
    return f'[mesh]\npp = 2\n{axis} = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\n{data_parallel}{more}'


# ---- numerics --------------------------------------------------------------------------------------------------------


def cells(schedules):
    return [
        pytest.param(schedule, name, id=f"{schedule}-{name}")
        for schedule in schedules
        for name in DATA_PARALLEL
        if name != "reshard2" or schedule in ("1F1B", "Interleaved1F1B")
    ]


@pytest.mark.parametrize(("schedule", "name"), cells(FAST))
def test_gradients_equal_one_device(schedule, name):
    # 12 sequences of different lengths: 6 a data-parallel rank, 6 micro-batches.
    step = partial(pipelined_step, microbatch=1)
    assert_equal_to_one_device(run_ranks(step, 4, manifest(schedule, DATA_PARALLEL[name]), Net, {"num_layers": 4}))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "name"), cells(SLOW))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["", "[scheduling.activation_checkpoint]\n"])
def test_gradients_equal_one_device_for_all_schedules(schedule, name, tied, recompute):
    text = manifest(schedule, DATA_PARALLEL[name], recompute)
    options = {"num_layers": 4, "tied": tied}
    assert_equal_to_one_device(run_ranks(partial(pipelined_step, microbatch=1), 4, text, Net, options))


FOUR_LAYERS = {"num_layers": 4}


@pytest.mark.parametrize("schedule", FAST)
def test_mixed_precision_cuts_nothing_at_stages(schedule):
    # Micro-batches as one device takes them: what travels between stages is what a block gives the next one.
    (alone,) = run_ranks(losses_of, 1, "[sharding.fsdp2]\n[precision.mixed]\n", Net, FOUR_LAYERS)
    text = f'[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\n[sharding.fsdp2]\n[precision.mixed]\n'
    for losses in run_ranks(losses_of, 2, text, Net, FOUR_LAYERS):
        assert losses == pytest.approx(alone, rel=1e-3)
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("plugin", ["[sharding.fsdp2]\n", "[sharding.ddp]\n", ""])
def test_the_dtype_of_outputs_is_that_of_the_last_stages(plugin):
    # In float32 but for the outputs: what stages hand on is not cut to theirs.
    text = f'{plugin}[precision.mixed]\nparam_dtype = "float32"\noutput_dtype = "bfloat16"\n'
    (alone,) = run_ranks(losses_of, 1, text, Net, FOUR_LAYERS)
    for losses in run_ranks(losses_of, 2, f"[mesh]\npp = 2\n[scheduling.pipeline]\n{text}", Net, FOUR_LAYERS):
        assert losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
# Dynamo looks at the .grad of everything that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_blocks():
    text = '[mesh]\npp = 2\n[scheduling.pipeline]\n[scheduling.compile]\nbackend = "aot_eager"\n'
    (alone,) = run_ranks(losses_of, 1, "", Net, FOUR_LAYERS)
    for losses in run_ranks(losses_of, 2, text, Net, FOUR_LAYERS):
        assert losses == pytest.approx(alone, rel=1e-4)


# ---- collectives -----------------------------------------------------------------------------------------------------


def second_step(text):
    run = composed(text + "\n[train]\nmicrobatch = 1\n", seeded(num_layers=4))
    tokens, targets = padded()
    for number in range(2):
        with count_collectives(run.mesh) as collectives, run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
    run.close()
    return {key: count for key, (count, _) in collectives.summary().items() if key[1] == "dp_shard"}


@pytest.mark.parametrize(
    ("schedule", "name", "gathers"),
    [
        # Units of a rank: two blocks and a root a stage. Gradients are reduced once, whatever the ZeRO stage.
        ("1F1B", "zero3", None),
        ("1F1B", "zero2", 1),
        ("1F1B", "zero1", 1),
        ("ZBVZeroBubble", "zero3", 1),
    ],
)
def test_parameters_are_gathered_once_where_they_are_kept(schedule, name, gathers):
    for counted in run_ranks(second_step, 4, manifest(schedule, DATA_PARALLEL[name])):
        units = 4 if schedule == "ZBVZeroBubble" else 3
        assert counted["reduce_scatter", "dp_shard"] <= units
        if gathers is None:
            assert counted["all_gather", "dp_shard"] > units
        else:
            assert counted["all_gather", "dp_shard"] == counted["reduce_scatter", "dp_shard"] * gathers
