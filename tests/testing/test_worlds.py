from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composer3d.errors import RankError
from composer3d.testing import fake_world
from composer3d.torch_compat import fake_group


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (8, 3), (16384, 16383)])
def test_any_rank_of_any_world(world_size, rank):
    with fake_world(world_size, rank):
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (world_size, rank, "fake")
    assert not dist.is_initialized()


def test_meshes_and_sharding_work_as_in_a_real_world():
    from torch.distributed.fsdp import fully_shard

    with fake_world(64, 9):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp_shard", "tp"))
        layer = fully_shard(torch.nn.Linear(4, 16), mesh=mesh["dp_shard"])
        layer(torch.ones(2, 4)).sum().backward()
        assert list(mesh.get_coordinate()) == [1, 1]
        assert tuple(layer.weight.to_local().shape) == (2, 4)


def test_the_world_ends_with_its_block_even_by_an_error():
    with pytest.raises(ZeroDivisionError), fake_world(4):
        raise ZeroDivisionError
    with fake_world(2):
        assert dist.get_world_size() == 2


def test_a_block_may_end_its_world_itself():
    with fake_world(4):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(RankError) as caught, fake_world(4, 4):
        pass
    assert str(caught.value) == "a world of 4 ranks has no rank 4; its ranks are 0 to 3"


def test_a_world_inside_another_is_refused():
    with fake_world(4, 1):
        with pytest.raises(RankError) as caught, fake_world(2):
            pass
        assert dist.get_world_size() == 4
    assert str(caught.value) == (
        "this process is rank 1 of 4 already, as of a composition that is open, and a fake process group cannot be "
        "made beside that one; write run.close() first, or torch.distributed.destroy_process_group()"
    )


def test_nothing_is_left_of_a_world_before_it():
    """Torch remembers what operators return by meshes that are equal, and their groups with them."""
    from torch.distributed.tensor import DTensor, Shard

    def mesh_of_result():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(torch.ones(4, 3), mesh, [Shard(1)], run_check=False)
        return mesh, torch.nn.functional.linear(x, x).device_mesh

    with fake_group(2, 0):
        mesh_of_result()
    with fake_world(2):
        mesh, found = mesh_of_result()
        assert found is mesh
