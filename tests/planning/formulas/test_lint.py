"""Each rule of the lint alone: what it says of a layout that is wrong in one way, and nothing of one that is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_shape import ModelShape
from decoder_traces import static_traces
from support.decoder_costs import advice_on

from composer3d.planning.formulas.collective_formulas import transfer
from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.formulas.lint import lint
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.tracing.traced import Segment

H100 = load_hardware("h100")
SHAPE = ModelShape(num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256)
GOOD = Setup(seq_len=4096, global_batch=64, microbatch=1, dp_shard=64, zero=3)
RESHARDING = {"global_batch": 128, "tp": 4, "dp_shard": 16}


def rules(setup, **options):
    found = {}
    for advice in advice_on(SHAPE, setup, H100, **options):
        found.setdefault(advice.rule, advice)
    return found


def test_a_good_layout_has_no_mistakes():
    assert advice_on(SHAPE, GOOD, H100) == ()


@pytest.mark.parametrize(
    ("rule", "change", "severity", "told"),
    [
        ("world", {"tp": 2}, "error", "= 128 ranks, not 64"),
        ("divisibility", {"pp": 64}, "error", "64 stages, but only 32 layers; pp x stages_per_rank is at most 32"),
        ("batch", {"global_batch": 100}, "error", "= 1.5625, which is not whole; global_batch = 64 or 128"),
        (
            "does not fit",
            {"microbatch": 2, "global_batch": 128},
            "error",
            'GiB; [scheduling.activation_checkpoint] mode = "full" needs at least',
        ),
        ("tp across nodes", {"tp": 16}, "warning", "collectives a step take"),
        ("micro-batches", {"pp": 8}, "warning", "1 micro-batches on 8 stages: idle 87.5% of the step"),
        (
            "micro-batches",
            {"pp": 8, "stages_per_rank": 2, "schedule": "Interleaved1F1B"},
            "error",
            "needs whole rounds of 8 micro-batches, and there are 1; make them 8",
        ),
        ("imbalance", {"pp": 5}, "warning", "32 layers on 5 stages: the largest holds 7, so the others wait 9%"),
        ("resharding", RESHARDING, "warning", "a step; [sharding.fsdp2] zero = 2 gathers 8 times and reduces once"),
        ("precision", {"precision": Precision(dtype="int4")}, "error", "multiplies no int4: it would be emulated"),
        (
            "recompute",
            {"recompute": "full", "seq_len": 1024},
            "warning",
            "recompute full computes a third more than is needed",
        ),
    ],
)
def test_mistakes_are_told_with_numbers(rule, change, severity, told):
    found = rules(replace(GOOD, **change), world_size=64 if rule == "world" else None)
    assert found[rule].severity == severity
    assert told in str(found[rule]), str(found[rule])
    assert rule not in rules(GOOD)


@pytest.mark.parametrize(("num_reductions", "is_advised"), [(8, True), (1, False)], ids=["each time", "once"])
def test_resharding_is_advised_against_where_the_traced_step_reshards(num_reductions, is_advised):
    """A stage that is one unit keeps its parameters at every ZeRO stage, and reduces its gradients once a step."""
    setup = replace(GOOD, **RESHARDING)
    # Two units of one size, each of half of what a rank of tp has.
    options = {"count": 2, "dtype": "float32", "overlapped": True}
    half = SHAPE.num_parameters * 4 // setup.tp // 2
    sent = transfer("reduce_scatter", "dp_shard", setup.ranks("dp_shard"), half, **options)
    segment = Segment(kind="backward", stage=0, count=num_reductions, operators=(), transfers=(sent,))
    trace = max(static_traces(SHAPE, setup), key=lambda trace: trace.memory.peak)
    found = lint(
        replace(trace, segments=(segment,)),
        setup,
        H100,
        num_parameters=SHAPE.num_parameters,
        num_layers=SHAPE.num_layers,
        total_bytes=trace.memory.peak,
        offered=lambda trait, value: f"[sharding.other] {trait} = {value}",
    )
    assert ("resharding" in {advice.rule for advice in found}) == is_advised


def test_what_no_plugin_offers_is_not_advised():
    large = replace(GOOD, microbatch=2, global_batch=128)
    found = rules(large, offered=lambda trait, value: "[sharding.other]" if trait == "offloads_state" else None)
    assert found["does not fit"].fix == "composer3d suggest searches for a layout that fits"
    whole = replace(GOOD, dp_shard=1, dp_replicate=64, zero=0, recompute="full", microbatch=1)
    found = rules(whole, offered=lambda trait, value: f"[sharding.other] {trait} = {value}", memory_bytes=160 * 2**30)
    assert found["does not fit"].fix.startswith("[sharding.other] zero = 1 needs about")
    assert "resharding" not in rules(replace(GOOD, **RESHARDING), offered=lambda trait, value: None)


def test_a_model_that_fits_no_degrees():
    found = rules(replace(GOOD, dp_shard=1, zero=0, global_batch=1), memory_bytes=16 * 2**30)
    assert found["cannot fit"].message.startswith("8.03 B parameters x 16 bytes = 128.5 GB")
    assert found["cannot fit"].fix.startswith("take at least 8 devices")
    assert "does not fit" not in found


def test_what_cannot_run_comes_first():
    setup = replace(GOOD, global_batch=100, recompute="full", seq_len=1024, dp_shard=63)
    severities = [advice.severity for advice in advice_on(SHAPE, setup, H100)]
    assert severities == sorted(severities) and len(set(severities)) == 2
