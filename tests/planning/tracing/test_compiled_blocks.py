"""Compiled modules in a plan: they keep what is costly, compute none of it twice, and their fusion is in the time."""

from __future__ import annotations

import pytest

from composer3d import plan

GIB = 2**30
MANIFEST = """
composer3d = 1
[mesh]
dp_shard = 8
[model]
use = "composer3d.models:llama"
args = { dim = 5120, num_layers = 40, num_heads = 40, ffn_dim = 13824, vocab_size = 32000 }
[data]
use = "synthetic"
seq_len = 4096
[train]
steps = 1
global_batch = 16
microbatch = 2
[sharding.fsdp2]
[precision.mixed]
"""
COMPILED = "scheduling.compile.backend='aot_eager'"


@pytest.fixture
def planned(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    return lambda *overrides: plan(path, hardware="a100-80", overrides=overrides).plan


def flops(found):
    segments = found.ranks[0].trace.segments
    return sum(segment.count * call.count * call.flops for segment in segments for call in segment.operators)


def test_llama_2_13b_with_two_sequences_and_without_recomputation_fits_where_it_ran(planned):
    eager, compiled = planned(), planned(COMPILED)
    assert eager.verdict == "does not fit"
    assert compiled.verdict == "fits"
    assert flops(compiled) == flops(eager)
    assert compiled.time["step_s"]["value"] < eager.time["step_s"]["value"]
    memory = [found.ranks[0].trace.memory for found in (eager, compiled)]
    assert memory[0].parameters == memory[1].parameters
    # Of a token and its width: the block's input, queries, keys, values, what attention and its projection make, and
    # both products of the feed-forward before its last, in two bytes each; and that last one.
    width = 2 * 4096 * 5120
    kept = 2 * (1 + 3 + 2 + 2 * 13824 / 5120 + 1)
    assert memory[1].activations / 40 / width == pytest.approx(kept, rel=0.1)


def test_what_is_recomputed_anyway_is_not_kept(planned):
    recomputed = "scheduling.activation_checkpoint={}", "model.args.num_layers=4"
    plain, compiled = planned(*recomputed), planned(*recomputed, COMPILED)
    assert flops(compiled) == flops(plain)
    assert compiled.ranks[0].trace.memory.activations == plain.ranks[0].trace.memory.activations


@pytest.mark.parametrize("backend", ["eager", "aot_eager_default_partitioner"])
def test_a_backend_that_does_not_partition_is_planned_as_eager(planned, backend):
    small = "model.args.num_layers=4"
    plain, compiled = planned(small), planned(small, f"scheduling.compile.backend='{backend}'")
    assert compiled.ranks[0].trace.memory == plain.ranks[0].trace.memory
    assert compiled.time["step_s"] == plain.time["step_s"]
