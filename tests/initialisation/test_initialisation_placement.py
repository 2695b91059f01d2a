from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from torch import nn

from composer3d.errors import InitialisationError, TransformError
from composer3d.initialisation import fingerprints, materialise, place, record, restore_ties
from composer3d.testing import run_ranks


def quietly(function, *args):
    """Gathering strided shards is slow, and torch says so each time."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return function(*args)


def placed_by_fsdp_and_tp(sizes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    wrong = []
    for rows, style in product((8, 7, 5, 3, 2), (ColwiseParallel, RowwiseParallel)):
        layer = nn.Linear(7, rows, bias=False)
        full = torch.arange(float(layer.weight.numel())).reshape(rows, 7)
        layer.weight.data.copy_(full)
        model = nn.Sequential(layer)
        parallelize_module(model, mesh["tp"], {"0": style()})
        fully_shard(model, mesh=mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"])
        weight = model[0].weight
        cut_by_torch = weight.to_local().clone()
        with torch.no_grad():
            weight.to_local().fill_(-1)
        place(weight, full.double())
        if not (torch.equal(weight.to_local(), cut_by_torch) and torch.equal(weight.full_tensor(), full)):
            wrong.append((rows, style.__name__))
    return wrong


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4)], ids=str)
def test_full_tensors_land_where_fsdp_and_tensor_parallelism_put_them(sizes):
    assert run_ranks(quietly, 4, placed_by_fsdp_and_tp, sizes) == [[]] * 4


def placed_as_distributed():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

    mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    for shape, placements in [
        ((7, 5), (Shard(0), Shard(0))),
        ((7, 5), (Shard(1), Shard(0))),
        ((3, 5, 2), (Shard(1), Shard(1))),
        ((7,), (Replicate(), Shard(0))),
        ((3, 7), (Shard(1), Replicate())),
        ((1, 7), (Shard(0), Shard(0))),
    ]:
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        target = zeros(*shape, device_mesh=mesh, placements=placements)
        place(target, full)
        expected = distribute_tensor(full, mesh, placements, src_data_rank=None)
        if not (torch.equal(target.to_local(), expected.to_local()) and torch.equal(target.full_tensor(), full)):
            wrong.append((shape, placements))
    return wrong


def test_any_placements_over_several_axes():
    assert run_ranks(quietly, 4, placed_as_distributed) == [[]] * 4


def partial_is_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    target = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (2,)), [Partial()])
    try:
        place(target, torch.ones(4))
    except InitialisationError as error:
        return str(error)


def test_a_partial_sum_cannot_be_placed():
    assert run_ranks(partial_is_refused, 2) == ["a full tensor cannot be placed as P(sum)"] * 2


class Model(nn.Module):
    """Sizes that no layout divides, a tie, and one initialiser of every kind."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(5) * 0.1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)


def layout(sizes):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, recipe = record(Model)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tp"))
    retied = ()
    if sizes[1] > 1:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "layers.*": ColwiseParallel(),
            "head": ColwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
        retied = restore_ties(model, recipe.ties)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    assert materialise(model, recipe, seed=3, device="cpu") == ()
    assert model.head.weight is model.embedding.weight
    tensors = [*model.named_parameters(), *model.named_buffers()]
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors}
    whole = nn.Module()
    for name, tensor in full.items():
        whole.register_buffer(name.replace(".", "_"), tensor.detach())
    return retied, fingerprints(whole)


def test_every_layout_starts_from_the_same_model():
    (_, alone), *_ = run_ranks(quietly, 1, layout, (1, 1))
    module, recipe = record(Model)
    materialise(module, recipe, seed=3, device="cpu")
    plain = fingerprints(module)
    assert alone == {name.replace(".", "_"): digest for name, digest in plain.items()}
    for sizes, retied in [((2, 1), ()), ((4, 1), ()), ((1, 2), ("head.weight",)), ((2, 2), ("head.weight",))]:
        results = run_ranks(quietly, sizes[0] * sizes[1], layout, sizes)
        assert results == [(retied, alone)] * len(results), sizes


def tied_but_planned_apart():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, recipe = record(Model)
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {"head": ColwiseParallel()})
    try:
        restore_ties(model, recipe.ties)
    except TransformError as error:
        return str(error)


def test_a_tie_planned_in_two_ways_is_refused():
    message = (
        '"embedding.weight" and "head.weight" are one tensor, but are now placed as shape (11, 6) '
        "and as shape (11, 6) with (S(0)) over ('tp',); plan both alike"
    )
    assert run_ranks(tied_but_planned_apart, 2) == [message] * 2
