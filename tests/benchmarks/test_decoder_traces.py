"""Published runs in closed form: bytes, operators and collectives of decoders, against counts made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_block import block
from decoder_shape import ModelShape
from decoder_traces import parameters_of, peak_bytes, static_traces
from flops_conventions import CONVENTIONS, flops_per_token

from composer3d.models import llama
from composer3d.models.flops import num_flops_per_token
from composer3d.planning.costs.allocator import reserved_bytes
from composer3d.planning.formulas.layout_numbers import Precision, Setup, in_flight, layers_of
from composer3d.planning.hardware.hardware_file import load_hardware

LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256
)
GPT_175B = ModelShape(
    num_layers=96, hidden=12288, num_heads=96, num_kv_heads=96, head_dim=128, ffn=49152, vocab_size=51200, gated=False
)
RUN = Setup(seq_len=8192, global_batch=16)


def transfers(setup, shape=LLAMA_8B, rank=0):
    """Return counts over a step by operation and axis."""
    counts = {}
    for segment in static_traces(shape, setup)[rank].segments:
        for transfer in segment.transfers:
            key = (transfer.op, transfer.axis)
            counts[key] = counts.get(key, 0) + transfer.count * segment.count
    return counts


def flops(setup, shape=LLAMA_8B):
    return sum(
        call.flops * call.count * segment.count
        for trace in static_traces(shape, setup)
        for segment in trace.segments
        for call in segment.operators
    )


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_shape_are_those_of_the_model(tied):
    model = llama(dim=64, num_layers=3, num_heads=8, num_kv_heads=2, vocab_size=96, ffn_dim=160, tie_embeddings=tied)
    shape = ModelShape(
        num_layers=3, hidden=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn=160, vocab_size=96, tied=tied
    )
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert flops_per_token(shape, 128, "palm") == num_flops_per_token(model, 128)
    assert LLAMA_8B.num_parameters == 8_030_261_248


def test_conventions_of_model_flops():
    # BLOOM's 104.5 s a step for 2048 sequences on 384 devices were published as 150 TFLOPs: with the recomputation.
    bloom = ModelShape(
        num_layers=70,
        hidden=14336,
        num_heads=112,
        num_kv_heads=112,
        head_dim=128,
        ffn=57344,
        vocab_size=250880,
        gated=False,
        tied=True,
    )
    rate = 2048 * 2048 / 104.5 / 384
    assert flops_per_token(bloom, 2048, "megatron96") * rate / 1e12 == pytest.approx(150.0, abs=0.1)
    assert flops_per_token(bloom, 2048, "korthikanti") < 0.76 * flops_per_token(bloom, 2048, "megatron96")
    assert flops_per_token(LLAMA_8B, 8192, "causal") < flops_per_token(LLAMA_8B, 8192, "palm")
    assert all(flops_per_token(LLAMA_8B, 8192, name) > 6 * 7e9 for name in CONVENTIONS)


def test_operators_add_up_to_the_models_flops():
    # Attention's backward executes five products of which the convention counts four.
    counted = flops_per_token(LLAMA_8B, 8192, "palm") * 16 * 8192
    attention = 12 * 32 * 4096 * 8192 * 16 * 8192
    norms = 6 * (2 * 32 + 1) * 4096 * 16 * 8192
    assert flops(RUN) == pytest.approx(counted - norms + attention / 6, rel=1e-6)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 4), (8, 2)])
def test_degrees_share_the_flops(tp, pp):
    whole = flops(RUN)
    shared = replace(RUN, tp=tp, pp=pp)
    total = sum(
        sum(call.flops * call.count * segment.count for segment in trace.segments for call in segment.operators)
        * trace.stands_for
        for trace in static_traces(LLAMA_8B, shared)
    )
    assert total == pytest.approx(whole, rel=1e-6)


def test_bytes_of_a_block_are_those_that_were_counted():
    # Eager Llama-3-8B: 56 bytes a token and width were counted, 15.8 with every second product kept.
    unit = 8192 * 4096
    found = block(LLAMA_8B, RUN)
    assert found.saved_bytes / unit == pytest.approx(56, rel=0.05)
    assert found.selective_bytes / unit == pytest.approx(15.8, rel=0.05)
    # Korthikanti et al.: 34 + 5 a s / h for GPT with its scores in memory, less dropout's masks.
    setup = replace(RUN, seq_len=2048, attention="math", kernels="fused", precision=Precision(dtype="float16"))
    unit = 2048 * 12288
    assert block(GPT_175B, setup).saved_bytes / unit == pytest.approx(34 + 5 * 96 * 2048 / 12288, rel=0.05)
    parallel = replace(setup, tp=8, sequence_parallel=True)
    assert block(GPT_175B, parallel).saved_bytes * 8 == pytest.approx(block(GPT_175B, setup).saved_bytes, rel=0.01)


@pytest.mark.parametrize(("zero", "gathers", "reductions"), [(3, 2 * 33 * 4 - 4, 33 * 4), (2, 33 * 4, 32), (1, 32, 32)])
def test_collectives_of_sharding(zero, gathers, reductions):
    # U units and M micro-batches, as plugins/README.md counts; below stage 3 the root's gradients go with the blocks'.
    counts = transfers(replace(RUN, dp_shard=4, zero=zero))
    assert counts[("all_gather", "dp_shard")] == gathers
    assert counts[("reduce_scatter", "dp_shard")] == reductions


def test_collectives_of_copies_and_hybrids():
    assert transfers(replace(RUN, dp_replicate=4, zero=0)) == {("all_reduce", "dp_replicate"): 32}
    hybrid = transfers(replace(RUN, dp_replicate=2, dp_shard=2))
    assert hybrid[("all_reduce", "dp_replicate")] == hybrid[("reduce_scatter", "dp_shard")]


@pytest.mark.parametrize(("recompute", "number"), [("none", 4), ("full", 6)])
def test_collectives_of_tensor_parallelism(recompute, number):
    setup = replace(RUN, tp=4, recompute=recompute)
    assert transfers(setup)[("all_reduce", "tp")] == number * 32 * 16
    halves = transfers(replace(setup, sequence_parallel=True))
    assert halves[("all_gather", "tp")] == halves[("reduce_scatter", "tp")] == number * 32 * 16


def test_messages_of_a_pipeline():
    setup = replace(RUN, pp=4)
    first, inner, last = (transfers(setup, rank=rank)[("send", "pp")] for rank in range(3))
    assert (first, inner, last) == (16, 32, 16)
    assert [trace.stands_for for trace in static_traces(LLAMA_8B, setup)] == [1, 2, 1]


def test_states_are_divided_by_the_stage():
    for zero, parts in ((0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))):
        setup = replace(RUN, zero=zero, shards_weights=False, dp_shard=8 if zero else 1, dp_replicate=1 if zero else 8)
        memory = static_traces(LLAMA_8B, setup)[0].memory
        sizes = [4 * LLAMA_8B.num_parameters, 4 * LLAMA_8B.num_parameters, 8 * LLAMA_8B.num_parameters]
        expected = [size / part for size, part in zip(sizes, parts, strict=True)]
        assert [memory.parameters, memory.gradients, memory.optimizer] == pytest.approx(expected, rel=1e-6)


def test_stages_hold_all_parameters_once():
    setup = replace(RUN, pp=4, stages_per_rank=2, tp=2)
    assert sum(layers_of(LLAMA_8B.num_layers, setup)) == 32
    held = [parameters_of(LLAMA_8B, setup, rank)[0] for rank in range(4)]
    norms = 2 * 4096 * 32
    assert sum(held) == pytest.approx((LLAMA_8B.num_parameters - norms - 4096) / 2 + norms)


@pytest.mark.parametrize(
    ("schedule", "stages", "rank", "expected"),
    [
        ("GPipe", 1, 0, 16),
        ("1F1B", 1, 0, 4),
        ("1F1B", 1, 3, 1),
        ("Interleaved1F1B", 2, 0, 5.5),  # p (1 + (p - 1) / (p v)): more than 1F1B, not less
        ("ZBVZeroBubble", 2, 0, 4),
    ],
)
def test_micro_batches_in_flight(schedule, stages, rank, expected):
    assert in_flight(replace(RUN, pp=4, schedule=schedule, stages_per_rank=stages), rank) == expected


def test_less_is_kept_where_more_is_recomputed_or_shared():
    peaks = [peak_bytes(LLAMA_8B, replace(RUN, dp_shard=8, recompute=mode)) for mode in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert peak_bytes(LLAMA_8B, replace(RUN, dp_shard=8, offload=True)) == pytest.approx(
        peaks[0] - LLAMA_8B.num_parameters
    )
    traces = static_traces(LLAMA_8B, replace(RUN, pp=4, dp_shard=2))
    assert peak_bytes(LLAMA_8B, replace(RUN, pp=4, dp_shard=2)) == max(trace.memory.peak for trace in traces)


def test_reserved_bytes_hold_context_and_fragmentation():
    device = load_hardware("h100").device
    assert reserved_bytes(1e10, device) == 1e10 * device.reserve_factor + device.context_bytes
