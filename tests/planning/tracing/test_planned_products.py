"""Products in a plan: each that a rank computes is counted once, in its shard's shape and in the format it has."""

from __future__ import annotations

from collections import Counter

import pytest

from composer3d import plan

MANIFEST = """
composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 256, num_layers = 2, num_heads = 8, num_kv_heads = 4, ffn_dim = 512, vocab_size = 512 }
[data]
use = "synthetic"
seq_len = 128
[train]
steps = 1
global_batch = 2
microbatch = 1
[precision.mixed]
"""
LAYOUTS = {
    "one": (1, ()),
    "fsdp2": (2, ("mesh.dp_shard=2", "sharding.fsdp2={}")),
    "tp": (2, ("mesh.tp=2", "sharding.tensor_parallel={}")),
    "sp": (2, ("mesh.tp=2", "sharding.tensor_parallel.sequence_parallel=true")),
}


@pytest.fixture
def products(tmp_path):
    """Return FLOPs of matrix products of all ranks, by operator and dtype."""
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)

    def counted(layout, *overrides):
        world_size, sharding = LAYOUTS[layout]
        (rank,) = plan(path, world_size=world_size, overrides=(*sharding, *overrides)).plan.ranks
        found = Counter()
        for segment in rank.trace.segments:
            for call in segment.operators:
                if call.name.endswith("mm"):
                    found[call.name, call.dtype] += world_size * segment.count * call.count * call.flops
        return found

    return counted


@pytest.mark.parametrize("layout", ["fsdp2", "tp", "sp"])
def test_sharded_products_are_those_of_one_device(products, layout):
    assert products(layout) == products("one")


@pytest.mark.parametrize(
    "precision",
    ["float8.recipe='tensorwise'", "float8.recipe='rowwise'", "mxfp8.recipe='mxfp8'"],
    ids=["tensorwise", "rowwise", "mxfp8"],
)
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_products_in_float8_are_planned_as_those_of_a_device_that_has_them(products, layout, precision):
    found = products(layout, f"precision.{precision}")
    assert {name for name, _ in found} == {"aten._scaled_mm"}
    assert {dtype.partition("_")[0] for _, dtype in found} == {"float8"}
    assert found.total() == products("one").total()


def test_mxfp8_products_of_which_the_gradients_of_weights_are_not_are_planned_so(products):
    found = products("fsdp2", "precision.mxfp8.recipe='mxfp8_wgrad_hp'")
    kinds = {name: {dtype.partition("_")[0] for each, dtype in found if each == name} for name, _ in found}
    assert kinds == {"aten._scaled_mm": {"float8"}, "aten.mm": {"bfloat16"}}
    assert found.total() == products("one").total()
    assert 2 * found["aten.mm", "bfloat16"] >= found.total() - found["aten.mm", "bfloat16"]  # the head is not converted


def test_products_that_are_to_be_emulated_are_planned_in_float32(products):
    found = products("fsdp2", "precision.float8.emulate=true")
    assert set(found) == {("aten.mm", "float32")}
    assert found.total() == products("one").total()
