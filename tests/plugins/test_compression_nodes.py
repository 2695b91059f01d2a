"""int4 between nodes alone: two stages of it, and its refusal where ranks share a node."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.communication.compression.codecs import make_codec
from support.models import composed, mine, padded
from support.replicated_gradients import Recorded, rows_of_codec

import composer3d
from composer3d import ManifestError
from composer3d.testing import count_collectives, full, run_ranks

INT4 = '[communication.compression]\ngradients = "int4"\nblock = 16\n'
INT8 = INT4.replace("int4", "int8")
FSDP = "[sharding.fsdp2]\n"
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n{nodes}[sharding.fsdp2]\n"


def exchanged(texts):
    """Return a rank's collectives and exchanges of replicas in a step of each manifest, and its gradients."""
    found, recorded = [], Recorded()
    recorded.attach(setattr)
    for text in texts:
        recorded.calls = []
        torch.set_default_dtype(torch.float64)
        run = composed(text)
        tokens, targets = (mine(run, tensor) for tensor in padded())
        with count_collectives(run.mesh) as collectives, run.step(0):
            run.forward_backward(tokens, target=targets)
        gradients = {name: full(p.grad).clone() for name, p in run.named_parameters()}
        found.append((collectives.summary(), recorded.calls, gradients))
        run.close()
    return found


def test_of_two_stages_the_one_inside_of_a_node_sends_int8_and_the_one_between_nodes_int4():
    inside, everywhere = HYBRID.format(nodes="gpus_per_node = 2\n"), HYBRID.format(nodes="gpus_per_node = 1\n")
    ranks = run_ranks(exchanged, 4, [inside + INT4, everywhere + INT4, inside + INT8])
    mixed, narrow, wide = (summary for summary, *_ in ranks[0])
    assert mixed["all_to_all", "dp_shard"] == wide["all_to_all", "dp_shard"]
    assert mixed["all_to_all", "dp_replicate"] == narrow["all_to_all", "dp_replicate"]
    assert mixed["all_gather", "dp_replicate"] == narrow["all_gather", "dp_replicate"]
    assert narrow["all_to_all", "dp_shard"][1] < 0.7 * wide["all_to_all", "dp_shard"][1]
    assert mixed["all_to_all", "dp_replicate"][1] < 0.7 * wide["all_to_all", "dp_replicate"][1]
    calls = [found[0][1] for found in ranks]
    assert rows_of_codec(calls, codec=make_codec("int4", block=16), feedback=False) < 1e-6
    assert all(torch.equal(found[0][2][name], g) for found in ranks for name, g in ranks[0][0][2].items())


def refused(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value)


def test_ranks_that_a_launcher_has_started_on_one_node_are_refused_int4():
    found = run_ranks(refused, 2, FSDP + INT4)[0]
    assert 'gradients = "int4" over dp_shard, whose ranks share a node, of 2 ranks as the launcher says' in found
    assert 'write gradients = "int8", or' in found and "[mesh] gpus_per_node = 1" in found


@pytest.mark.parametrize(
    ("mesh", "axes", "said"),
    [
        ("dp_shard = 8\ngpus_per_node = 8\n", "", "over dp_shard, whose ranks share a node, of 8 ranks"),
        (
            "dp_replicate = 2\ndp_shard = 4\ngpus_per_node = 8\n",
            "",
            "over dp_shard and dp_replicate, whose ranks share",
        ),
        ("dp_replicate = 2\ndp_shard = 8\ngpus_per_node = 8\n", 'axes = ["dp_shard"]\n', "over dp_shard, whose ranks"),
        ("dp_replicate = 2\ndp_shard = 8\ngpus_per_node = 8\n", 'axes = ["dp_replicate"]\n', None),
        ("dp_replicate = 2\ndp_shard = 8\ngpus_per_node = 8\n", "", None),
        ("dp_shard = 16\ngpus_per_node = 8\n", "", None),
        ("dp_shard = 8\n", "", None),
    ],
)
def test_check_refuses_it_where_the_manifest_states_nodes(mesh, axes, said, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'composer3d = 1\nextends = "quickstart"\n[mesh]\n{mesh}[train]\nglobal_batch = 128\n{INT4}{axes}')
    found = composer3d.check(path)
    assert found.ok == (said is None), str(found)
    if said is not None:
        line = len(path.read_text().partition("gradients")[0].splitlines()) + 1
        assert f"run.toml:{line}:1: [communication.compression]" in str(found) and said in str(found)


def test_a_plan_says_which_stage_sends_what(tmp_path):
    path = tmp_path / "run.toml"
    head = 'composer3d = 1\nextends = "quickstart"\n'
    path.write_text(f"{head}[mesh]\ndp_replicate = 2\ndp_shard = 2\n[train]\nglobal_batch = 32\n{INT4}")
    notes = composer3d.plan(path).plan.notes
    assert [note for note in notes if note.startswith("gradients travel in int8 over dp_shard")] == [
        "gradients travel in int8 over dp_shard, whose ranks are taken for those of a node, and in int4 over "
        "dp_replicate: [mesh] gpus_per_node states the ranks of a node"
    ]
