from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from composer3d.checkpoint import load, read_tensor, save
from composer3d.errors import CheckpointError
from composer3d.testing import full, run_ranks


def refusal(path, tensors, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path, tensors=tensors, **options)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    tensors = {"layers.4.w": torch.ones(8, 8), "norm": torch.ones(8), "head": torch.ones(2), "ema/norm": torch.ones(8)}
    save(tmp_path / "step-1", tensors=tensors, state={"step": 1})
    return tmp_path / "step-1"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"layers.4.w": torch.zeros(16, 8)}, "the checkpoint holds layers.4.w of shape [8, 8], the model has [16, 8]"),
        ({"layers.4.w": torch.zeros(64)}, "the checkpoint holds layers.4.w of shape [8, 8], the model has [64]"),
        ({"norm": torch.zeros(8).half()}, "the checkpoint holds norm as float32, the model has float16"),
        ({"bias": torch.zeros(2)}, "the checkpoint lacks bias"),
        ({"norm": None, "head": None}, "the checkpoint also holds head; the checkpoint also holds norm"),
        (
            {"norm": torch.zeros(3), "bias": torch.zeros(2), "head": None},
            "the checkpoint lacks bias; the checkpoint holds norm of shape [8], the model has [3]; "
            "the checkpoint also holds head",
        ),
        (
            {f"x{index}": torch.zeros(1) for index in range(8)},
            "".join(f"the checkpoint lacks x{index}; " for index in range(5)) + "and 3 more",
        ),
    ],
)
def test_another_model_is_refused_before_anything_changes(path, tensors, text):
    base = {"layers.4.w": torch.zeros(8, 8), "norm": torch.zeros(8), "head": torch.zeros(2), "ema/norm": torch.zeros(8)}
    given = {key: tensor for key, tensor in (base | tensors).items() if tensor is not None}
    assert refusal(path, given) == f"{path}: of another model or optimizer: {text}"
    assert not any(tensor.any() for tensor in given.values())


def test_extra_keys_are_allowed_by_prefix(path):
    tensors = {"layers.4.w": torch.zeros(8, 8), "norm": torch.zeros(8)}
    text = f"{path}: of another model or optimizer: the checkpoint also holds head"
    assert refusal(path, tensors, allow_extra=["ema/"]) == text
    assert load(path, tensors=tensors, allow_extra=["ema/", "head"]) == {"step": 1}
    assert all(tensor.min() == 1 for tensor in tensors.values())


def test_no_checkpoint_is_named(path):
    missing = path.with_name("step-2")
    assert refusal(missing, {}) == f"{missing}: there is no checkpoint here; complete ones there: step-1"


def write_stages():
    rank = dist.get_rank()
    return {f"stage-{rank}": torch.full((3,), rank + 1.0), "shared": torch.full((2,), 9.0)}


def save_stages(path):
    save(path, tensors=write_stages(), state={})


def load_stages(path):
    tensors = {key: torch.zeros_like(tensor) for key, tensor in write_stages().items()}
    load(path, tensors=tensors)
    return all(torch.equal(tensor, write_stages()[key]) for key, tensor in tensors.items())


def load_other_stages(path):
    tensors = {key: torch.zeros_like(tensor) for key, tensor in write_stages().items()}
    if dist.get_rank() == 1:
        tensors["own"] = torch.zeros(1)
    return refusal(path, tensors)


def test_ranks_with_different_keys(tmp_path):
    run_ranks(save_stages, 3, tmp_path / "step-1")
    assert run_ranks(load_stages, 3, tmp_path / "step-1") == [True] * 3
    texts = run_ranks(load_other_stages, 2, tmp_path / "step-1")
    expected = "of another model or optimizer: the checkpoint lacks own; the checkpoint also holds stage-2"
    assert texts == [f"{tmp_path / 'step-1'}: {expected}"] * 2
    tensors = {"shared": torch.zeros(2), **{f"stage-{rank}": torch.zeros(3) for rank in range(3)}}
    load(tmp_path / "step-1", tensors=tensors)
    assert tensors["stage-2"].tolist() == [3, 3, 3]


def damage_of_one_rank(path):
    if dist.get_rank() == 0:
        save_path = path / "__1_0.distcp"
        save_path.write_bytes(bytes([save_path.read_bytes()[0] ^ 1]) + save_path.read_bytes()[1:])
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    return refusal(path, {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])})


def save_rows(path):
    save(path, tensors={"w": distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])}, state={})


def test_a_damaged_file_of_one_rank_is_raised_on_all(tmp_path):
    path = tmp_path / "step-1"
    run_ranks(save_rows, 2, path)
    first, second = run_ranks(damage_of_one_rank, 2, path)
    assert first == second
    assert first == (
        f"{path}: rank 1: {path / '__1_0.distcp'}: damaged: bytes 0 to 1,577 are not what was written, "
        "by their digest; go on from another checkpoint, or from a copy of this file"
    )


def model():
    # 5 and 3 rows: uneven over 2 ranks, and over 4 one rank of each is empty.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).double()


def sharded(shape):
    """Return the model in a layout: a mesh of 1 axis is FSDP, of 2 HSDP; None is no parallelism."""
    module = model()
    if shape:
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(module[0], mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module


def save_model(path, shape):
    module = sharded(shape)
    tensors = dict(module.named_parameters())
    save(path, tensors=tensors, state={})
    return {key: full(tensor).detach() for key, tensor in tensors.items()}


def load_model(path, shape):
    module = sharded(shape)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    load(path, tensors=dict(module.named_parameters()))
    return {key: full(tensor).detach() for key, tensor in module.named_parameters()}


@pytest.mark.parametrize("saved", [(1,), (2,), (4,), (2, 2)])
def test_fully_sharded_models_load_in_every_layout(tmp_path, saved):
    path = tmp_path / "step-1"
    expected = run_ranks(save_model, torch.Size(saved).numel(), path, saved)[0]
    reference = dict(model().named_parameters())
    for key, tensor in expected.items():
        assert torch.equal(tensor, reference[key])
        assert torch.equal(read_tensor(path, key), tensor)
    for shape in [None, (2,), (3,), (2, 2)]:
        for rank in run_ranks(load_model, torch.Size(shape or (1,)).numel(), path, shape):
            assert all(torch.equal(rank[key], expected[key]) for key in expected)


def strided(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    linear = nn.Linear(3, 7, bias=False)
    source = torch.arange(21.0).view(7, 3)
    linear.weight = nn.Parameter(distribute_tensor(source, mesh["tp"], [Shard(0)]))
    fully_shard(linear, mesh=mesh["dp_shard"])
    save(path, tensors={"w": linear.weight}, state={})
    target = DTensor.from_local(torch.zeros(7, 3), mesh["dp_shard"], [Replicate()])
    load(path, tensors={"w": target})
    linear.weight.detach().zero_()
    load(path, tensors={"w": linear.weight})
    return bool(torch.equal(target.to_local(), source)), linear.weight.placements


def test_tensor_parallel_under_fsdp(tmp_path):
    for equal, placements in run_ranks(strided, 4, tmp_path / "step-1"):
        assert equal and len(placements) == 2
    assert torch.equal(read_tensor(tmp_path / "step-1", "w"), torch.arange(21.0).view(7, 3))
