"""Axes over which gradients are averaged and parameters sharded: every plugin asks the context."""

from __future__ import annotations

import functools

import pytest
import torch
from support.models import composed, full, largest, mine, one_step, padded, seeded, sum_loss, write_manifest
from third_party.data_axes import ExpertNet

import composer3d
from composer3d import Batch, own_meshes
from composer3d.testing import assert_parity, count_collectives, fake_world, run_ranks

CP = '[sharding.sequences]\nuse = "third_party.data_axes:Sequences"\n'
EP = '[sharding.expert_shards]\nuse = "third_party.data_axes:ExpertShards"\n'
FSDP, DDP = "[sharding.fsdp2]\n", "[sharding.ddp]\n"
EXPERTS = {"factory": ExpertNet}


def even():
    return padded(num_sequences=8, seq_len=6)


def steps(world_size, text, **options):
    """Return the collectives of a step that is, on every rank, what one device computes."""
    found = run_ranks(functools.partial(one_step, text, batch=even, **options), world_size)
    assert largest(error for *errors, _ in found for error in errors) < 1e-12
    return found[0][-1]


@pytest.mark.parametrize(
    ("layout", "world_size", "op", "axis"),
    [
        ("cp = 2\n" + FSDP, 2, "all_gather", "cp"),
        ("cp = 2\ndp_replicate = 2\n" + FSDP, 4, "reduce_scatter", "cp"),
        ("cp = 2\n" + FSDP + "zero = 1\n", 4, "reduce_scatter", "world"),
        ("cp = 2\n" + DDP, 2, "all_reduce", "cp"),
        ("cp = 2\n" + DDP + 'reducer = "bucketed"\n', 4, "all_reduce", "world"),
    ],
    ids=["fsdp2", "hsdp", "zero1", "ddp", "ddp in buckets"],
)
def test_gradients_are_averaged_over_positions_with_samples(layout, world_size, op, axis):
    counted = steps(world_size, "[mesh]\n" + layout + CP, microbatch=2)
    assert counted[op, axis] > 3  # three blocks and the root, and three all-reduces of the core
    assert not any(over in ("dp_shard", "dp_shard+cp") for _, over in counted)


@pytest.mark.parametrize(
    ("layout", "world_size", "table", "over"),
    [
        ("ep = 2\n" + FSDP, 2, "", set()),
        ("ep = 2\n" + FSDP, 4, "", {"efsdp"}),
        ("ep = 2\n" + FSDP, 4, "shard_dim = 0\n", {"efsdp"}),
        ("ep = 2\ndp_shard = 2\ndp_replicate = 2\n" + FSDP, 4, "", {"dp_replicate"}),
        ("ep = 2\ncp = 2\ndp_shard = 2\n" + FSDP + CP, 4, "", {"efsdp"}),
        ("ep = 4\ncp = 2\ndp_shard = 2\n" + FSDP + CP, 4, "", set()),
        ("ep = 2\ncp = 2\n" + DDP + CP, 4, "", {"dp_replicate"}),
    ],
    ids=["fsdp2", "larger world", "along dim 0", "hsdp", "sequences", "over both axes", "ddp"],
)
def test_experts_have_a_mesh_of_their_own(layout, world_size, table, over):
    counted = steps(world_size, "[mesh]\n" + layout + EP + table, microbatch=1, options=EXPERTS)
    num_microbatches = 8 // world_size * (2 if "cp = 2" in layout else 1)
    # Two layers: forward 2 and 1, backward 1 and 2.
    assert counted["all_gather", "ep"] == counted["reduce_scatter", "ep"] == 2 * 3 * num_microbatches
    assert over <= {axis for _, axis in counted}


def test_gradients_of_experts_that_are_not_divided_are_too_large():
    text = "[mesh]\nep = 2\n" + FSDP + EP + "divides = false\n"
    ((_, _, error, _), _) = run_ranks(functools.partial(one_step, text, batch=even, options=EXPERTS), 2)
    assert 0.5 < error <= 1.0 + 1e-12


def saved(path, text):
    torch.set_default_dtype(torch.float64)
    run = composed(text, seeded(ExpertNet))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    if path.exists():
        run.load(path)
    tokens, targets = (mine(run, tensor) for tensor in even())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    held = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    if not path.exists():
        run.save(path)
    run.close()
    return held


def test_a_checkpoint_is_loaded_in_a_layout_with_other_data_axes(tmp_path):
    both = "[mesh]\nep = 2\ncp = 2\ndp_shard = 2\n" + FSDP + CP + EP
    run_ranks(saved, 4, tmp_path / "saved", both)
    again = [run_ranks(saved, size, tmp_path / "saved", text)[0] for size, text in ((4, both), (2, FSDP), (1, FSDP))]
    for found in again[1:]:
        assert found.keys() == again[0].keys()
        assert largest(float((found[fqn] - again[0][fqn]).abs().max()) for fqn in found) < 1e-12


@pytest.mark.parametrize("text", ["[mesh]\ncp = 2\n" + FSDP + CP, "[mesh]\nep = 2\n" + FSDP + EP])
def test_verify_agrees(text):
    tokens, targets = even()
    parity = assert_parity(
        functools.partial(seeded, ExpertNet),
        write_manifest(text),
        Batch(args=(tokens,), target=targets),
        world_size=2,
        loss_fn=sum_loss,
        microbatch=2,
        own_dtype=False,
    )
    assert parity.verdict.ok


def test_positions_that_nobody_averages_over_are_refused():
    path = write_manifest("[mesh]\ncp = 2\n" + CP)
    with fake_world(2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(seeded, path, loss_fn=sum_loss)
    assert str(caught.value) == (
        f"{path}:3:1: [mesh] cp = 2 shards sequences, and no plugin of this manifest averages gradients over cp: every "
        "rank would train on its own positions alone; add a data-parallel plugin: composer3d plugins shows which "
        "plugin averages over which axis"
    )


class Scaled(ExpertNet):
    """Experts with another parameter."""

    def __init__(self, *size):
        super().__init__()
        self.layers[0].experts.scale = torch.nn.Parameter(torch.ones(size))


def test_parameters_of_experts_in_no_unit_are_averaged_over_the_ranks_that_have_them():
    with fake_world(4):
        run = composed("[mesh]\nep = 2\n" + FSDP + EP, seeded(Scaled).float())
        assert own_meshes(run.parts[0].module, run.context).keys() == {"layers.0.experts", "layers.2.experts"}
        tokens, targets = (mine(run, tensor) for tensor in even())
        with count_collectives(run.mesh) as collectives, run.step(0):
            run.forward_backward(tokens, target=targets)
            run.clip_grad_norm_(1.0)
        assert collectives.count("all_reduce", "efsdp") == 1  # the scale has no dims
        run.close()


def test_parameters_of_one_module_with_two_meshes_are_refused():
    text = "[mesh]\nep = 2\n" + FSDP + EP.replace("ExpertShards", "HalfShards")
    with fake_world(2), pytest.raises(composer3d.TransformError) as caught:
        composed(text, Scaled(6))
    assert str(caught.value).startswith("[sharding.fsdp2] (")
    assert str(caught.value).endswith(
        '): "layers.0.experts.weight_EDD" has a mesh of its own, and other parameters of "layers.0.experts" have '
        "another: a unit is gathered and reduced over one mesh; make them modules of their own, each with its forward"
    )


def test_views_are_made_once_and_named():
    text = "[mesh]\ndp_replicate = 2\ndp_shard = 2\ncp = 2\nep = 2\n" + FSDP + CP + EP
    with fake_world(8):
        run = composed(text, seeded(ExpertNet))
        context = run.context
        mesh = context.data_mesh(None, replicas="dp_replicate", shards="dp_shard")
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard+cp")
        assert mesh is context.data_mesh(None, replicas="dp_replicate", shards="dp_shard")
        assert context.data_mesh(None, replicas="dp_replicate").mesh_dim_names == ("dp_replicate+cp",)
        assert context.data_mesh(None).size() == 1
        own = context.data_mesh("layers.0.experts.weight_EDD", replicas="dp_replicate", shards="dp_shard")
        assert own.mesh_dim_names == ("dp_replicate", "efsdp")
        assert context.expert_mesh().mesh_dim_names == ("dp_replicate", "efsdp", "ep")
        assert context.expert_mesh()["ep"].mesh.tolist() == [0, 1]
        assert {"dp_shard+cp", "efsdp", "ep"} <= context.views.groups.keys()
        assert [context.layout.axes_of(name) for name in ("dp_shard+cp", "efsdp", "tp")] == [
            ("dp_shard", "cp"),
            ("dp_shard", "cp"),
            ("tp",),
        ]
        run.close()
