"""Layouts in numbers: asked of plugins, whoever wrote them, and written as tables of the plugins that can make them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer3d.errors import QueryError
from composer3d.manifest import read_text, type_manifest
from composer3d.planning.formulas.layout_numbers import Precision
from composer3d.planning.formulas.manifest_setup import (
    choices_of,
    installed_offers,
    patch,
    setup_of,
    shards_experts,
    shards_sequences,
)
from composer3d.planning.suggesting.search import search_choices
from composer3d.runner import TABLES

BASE = (
    'model = "composer3d.models:llama"\ndata.use = "synthetic"\ndata.seq_len = 512\ntrain.steps = 1\n'
    "train.global_batch = 16\n"
)
FOREIGN = '[sharding.foreign]\nuse = "third_party.layout_plugins:Foreign"\n'


def typed(tables):
    return type_manifest(read_text(f"composer3d = 1\n{BASE}{tables}", "run"), tables=TABLES)


def patched(tables, degrees, **wanted):
    manifest = typed(tables)
    own = setup_of(manifest, degrees)
    return patch(manifest, own, replace(own, **wanted), installed_offers(manifest))


def test_built_in_plugins_say_what_they_are():
    manifest = typed(
        "[mesh]\npp = 2\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\nzero = 2\n[sharding.tensor_parallel]\n"
        "sequence_parallel = true\n[sharding.cpu_offload]\n[scheduling.pipeline]\n"
        'schedule = "Interleaved1F1B"\nstages_per_rank = 4\n[scheduling.activation_checkpoint]\n'
        '[scheduling.compile]\n[precision.mixed]\nreduce_dtype = "bfloat16"\n[precision.float8]\nall_gather = true\n'
    )
    found = setup_of(manifest, {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2})
    assert (found.zero, found.schedule, found.stages_per_rank, found.recompute) == (2, "Interleaved1F1B", 4, "full")
    assert (found.kernels, found.offload, found.sequence_parallel) == ("compiled", True, True)
    assert found.precision == Precision(dtype="float8_e4m3fn", compute_bytes=2, gather_bytes=1, reduce_bytes=2)


def test_experts_stay_sharded_over_as_many_ranks_as_the_layout_allows():
    tables = "[mesh]\ndp_shard = 4\nep = 4\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
    changes = {degree: patched(tables, {"dp_shard": 4, "ep": 4}, dp_shard=degree) for degree in (1, 2, 6, 8)}
    assert not any("ep" in change for change in changes[8])
    assert [change for change in changes[6] if "ep" in change] == ["mesh.ep=2"]
    assert [change for change in changes[2] if "ep" in change] == ["mesh.ep=2"]
    assert [change for change in changes[1] if "ep" in change] == ["mesh.ep=1"]


def test_experts_are_sharded_where_a_layout_says_so_and_the_given_one_is_not_changed():
    tables = "[mesh]\ndp_shard = 4\n[sharding.fsdp2]\n"
    assert patched(tables, {"dp_shard": 4}, ep=2) == ("mesh.ep=2", "sharding.expert_parallel={}")
    # Taken from tp too: ep need not divide dp_shard x cp.
    plugins = "".join(f"[sharding.{name}]\n" for name in ("fsdp2", "tensor_parallel", "expert_parallel"))
    taken = f"[mesh]\ndp_shard = 2\ntp = 2\nep = 4\n{plugins}"
    assert patched(taken, {"dp_shard": 2, "tp": 2, "ep": 4}) == ()
    offers = installed_offers(typed(tables))
    others = [each for each in offers if each.name not in ("expert_parallel", "context_parallel")]
    for order in (offers, offers[::-1]):
        assert shards_experts(order)
        assert shards_sequences(order)
    assert not shards_experts(others)
    assert not shards_sequences(others)


def test_nothing_said_is_one_device_in_float32():
    found = setup_of(typed(""), {})
    assert (found.zero, found.world_size, found.recompute, found.offload) == (0, 1, "none", False)
    assert found.precision == Precision(dtype="float32", compute_bytes=4, gather_bytes=4)


def test_a_plugin_of_another_package_is_examined_and_proposed_like_a_built_in_one():
    manifest = typed(FOREIGN)
    own = setup_of(manifest, {"dp_shard": 4})
    assert (own.zero, own.precision.gather_bytes) == (3, 1)
    offers = installed_offers(manifest)
    # It shards parameters already, so the built-in plugin that could do it too is not proposed beside it.
    assert [offered.name for offered in offers if 3 in offered.offer.choices.get("zero", ())] == ["foreign"]
    assert choices_of(offers, "zero").count(3) == 1
    assert patch(manifest, own, replace(own, zero=0, dp_shard=1, dp_replicate=4), offers) == (
        "mesh.dp_replicate=4",
        "sharding.ddp={}",
        "sharding.foreign=false",
    )


def test_two_plugins_that_say_different_things_are_named():
    manifest = typed(FOREIGN + '[precision.contrary]\nuse = "third_party.layout_plugins:Contrary"\n')
    with pytest.raises(
        QueryError, match=r"precision\.contrary.*sharding\.foreign.*both answer composer3d_layout for zero"
    ):
        setup_of(manifest, {"dp_shard": 4})


@pytest.mark.parametrize(
    ("tables", "degrees", "wanted", "changes"),
    [
        ("[mesh]\ndp_replicate = 4\n[sharding.ddp]\n", {"dp_replicate": 4}, {"zero": 0}, ()),
        (
            "[sharding.ddp]\n",
            {"dp_replicate": 4},
            {"zero": 2, "dp_shard": 4, "dp_replicate": 1},
            ("mesh.dp_shard=4", "sharding.ddp=false", "sharding.fsdp2.zero=2"),
        ),
        (
            "[mesh]\ndp_shard = 4\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n",
            {"dp_shard": 4},
            {"recompute": "selective", "offload": True},
            (
                "sharding.cpu_offload={}",
                'scheduling.activation_checkpoint.mode="selective"',
                'scheduling.activation_checkpoint.policy="every_second_product"',
            ),
        ),
        (
            "[mesh]\ndp_shard = 4\n[sharding.fsdp2]\n[precision.mixed]\n",
            {"dp_shard": 4},
            {"precision": replace(Precision(), dtype="float8_e4m3fn")},
            ("precision.float8={}",),
        ),
        (
            "[sharding.fsdp2]\n",
            {"dp_shard": 4},
            {"pp": 2, "dp_shard": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2},
            (
                "mesh.pp=2",
                "mesh.dp_shard=2",
                'scheduling.pipeline.schedule="Interleaved1F1B"',
                "scheduling.pipeline.stages_per_rank=2",
            ),
        ),
    ],
)
def test_only_what_differs_is_set(tables, degrees, wanted, changes):
    assert patched(tables, degrees, **wanted) == changes


def test_a_search_chooses_from_what_is_installed():
    offers = installed_offers(typed(""))
    assert search_choices(offers).zero == (1, 2, 3)
    without = [offered for offered in offers if offered.name not in ("tensor_parallel", "pipeline", "cpu_offload")]
    found = search_choices(without)
    assert (found.tp, found.schedules, found.offload) == (False, (), False)
    assert found.recompute == ("none", "selective", "full")


def test_what_a_manifest_compresses_stays_and_is_offered_to_others():
    tables = "[mesh]\ndp_shard = 4\n[sharding.fsdp2]\n"
    wanted = {"compression": "both"}
    sent = ('communication.compression.gradients="int8"', 'communication.compression.weights="int8"')
    assert patched(tables, {"dp_shard": 4}, **wanted) == sent
    own = tables + '[communication.compression]\ngradients = "fp8"\n'
    assert setup_of(typed(own), {"dp_shard": 4}).compression == "gradients"
    assert patched(own, {"dp_shard": 4}, microbatch=2) == ("train.microbatch=2",)
    assert patched(own, {"dp_shard": 4}, compression="none") == ("communication.compression=false",)
    assert patched(own, {"dp_shard": 4}, **wanted) == sent[1:]
    assert "both" in search_choices(installed_offers(typed(tables))).compression
