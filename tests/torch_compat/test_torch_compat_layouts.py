from __future__ import annotations

import logging
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composer3d import torch_compat
from composer3d.testing import fake_world, full, run_ranks


def test_shards_strided_or_not_are_told_from_replicas():
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert torch_compat.shard_of(Shard(1)) == (1, 1)
    assert torch_compat.shard_of(_StridedShard(0, split_factor=4)) == (0, 4)
    assert torch_compat.shard_of(Replicate()) is None and torch_compat.shard_of(Partial()) is None


def test_axes_flattened_are_one_group():
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat = torch_compat.flatten(mesh["a", "c"], "both")
        assert flat.mesh_dim_names == ("both",)
        assert dist.get_process_group_ranks(flat.get_group()) == [0, 1, 4, 5]


def test_a_flattened_view_divides_again_and_stands_beside_others():
    with fake_world(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        parts = torch_compat.unflatten(mesh["b"], {"outer": 2, "inner": 2}, own_group="inner")
        view = torch_compat.concatenate([mesh["a"], parts])
        assert view.mesh_dim_names == ("a", "outer", "inner")
        assert dist.get_process_group_ranks(view["inner"].get_group()) == [4, 5]
        assert torch_compat.mesh_dim(view["inner"].get_group()) == "inner"
        assert torch_compat.mesh_dim(dist.group.WORLD) is None


def test_a_dim_of_the_whole_world_has_a_group_of_its_own():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
        whole = torch_compat.unflatten(mesh, {"outer": 1, "inner": 4}, own_group="inner")["inner"].get_group()
        assert torch_compat.mesh_dim(whole) == "inner" and whole is not mesh.get_group()


def coordinate_of_a_result(rank):
    from torch.distributed.tensor import DTensor, Shard

    with fake_world(8, rank):
        mesh = init_device_mesh("cpu", (8,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        return list((tensor * 2).device_mesh.get_coordinate())


def test_results_belong_to_the_rank_that_this_process_is():
    # Without clearing, the second rank's result has the coordinates of the first: its mesh comes from a cache.
    assert [coordinate_of_a_result(rank) for rank in (3, 7, 0)] == [[3], [7], [0]]
    torch_compat.clear_sharding_caches()


def test_clearing_the_caches_does_not_import_dtensor():
    script = (
        "import sys; from composer3d.torch_compat import clear_sharding_caches; clear_sharding_caches()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_layout_is_given_to_other_memory():
    def other():
        from torch.distributed.tensor import Shard, distribute_tensor

        tensor = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        local = tensor.to_local() + 10
        made = torch_compat.with_local(tensor, local)
        same = made.to_local().data_ptr() == local.data_ptr() == torch_compat.local_of(made).data_ptr()
        return same, made.placements == tensor.placements, full(made)

    plain = torch.ones(2)
    assert torch_compat.local_of(plain) is plain
    for same, placed, value in run_ranks(other, 2):
        assert same and placed
        assert value.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]


def test_gathering_doubly_cut_tensors_is_silent(caplog):
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    before = log.level
    torch_compat.silence_redistribution()
    log.warning("two collectives")
    log.error("a fault")
    log.setLevel(before)
    assert [record.message for record in caplog.records] == ["a fault"]


def test_what_a_dtensor_holds_keeps_its_attributes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with fake_world(2):
        held = torch_compat.held_tensor(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,))))
        held.mark = 7
    assert torch_compat.held_tensor(held) is held and held.shape == (4,)


def attributes_of_gathered():
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch_compat.mark_unsharded(model, lambda parameter: {"scale": 3.0} if parameter is model.weight else {})
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(getattr(module.weight, "scale", None)))
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    return seen


def test_what_fsdp2_gathers_has_attributes():
    assert run_ranks(attributes_of_gathered, 2) == [[3.0, 3.0]] * 2
